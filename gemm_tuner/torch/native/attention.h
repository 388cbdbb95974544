/* Attention: y (b, h, m, d) = softmax(scale q kT + mask) v, of q (b, h, m, d), and of k and v
 * (b, heads, n, d), where h / heads heads of q share those of k and v. All are read where they lie.
 * y lies as q does, as in PyTorch: with the heads of a row side by side, it can be shown as rows. */

namespace {

inline bool is_causal(const LayerEntry &layer) {
    return std::find(layer.steps.begin(), layer.steps.end(), Step::causal) != layer.steps.end();
}

const LayerEntry &attention_numbered(int64_t number) {
    const LayerEntry &layer = layer_numbered(number);
    TORCH_CHECK(layer.is_attention(), "layer ", number, " is called by ",
                layer.w == Weights::packed ? "linear." : "matmul.");
    return layer;
}

/* What the kernels compute, for rows or keys that none of them is for, and for what is recorded. */
inline Tensor attention_plain(const LayerEntry &layer, const Tensor &q, const Tensor &k,
                              const Tensor &v, const std::optional<Tensor> &mask, double scale) {
    bool reads_mask = false, reads_scale = false;
    for (const Step step : layer.operands) {
        reads_mask |= step == Step::add;
        reads_scale |= step == Step::scale;
    }
    std::optional<Tensor> read;
    if (reads_mask) {
        TORCH_CHECK(mask, "mask must be given.");
        read = mask->expand_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)});
    }
    return at::scaled_dot_product_attention(q, k, v, read, 0.0, is_causal(layer),
                                            reads_scale ? scale : 1.0,
                                            q.sym_size(1) != k.sym_size(1));
}

/* Heads in groups: (b, heads, group, rows, columns); what is the same for all stays so. */
inline Tensor in_groups(const Tensor &given, int64_t heads, int64_t group) {
    if (given.dim() < 3) {
        return given;
    }
    return given.size(-3) == 1 ? given.unsqueeze(-3) : given.unflatten(-3, {heads, group});
}

inline void check_attention(const LayerEntry &layer, const Tensor &q, const Tensor &k,
                            const Tensor &v, const std::optional<Tensor> &mask, double scale) {
    const int64_t d = layer.k;
    check_matrices("q", q, layer.types.x);
    check_matrices("k", k, layer.types.w);
    check_matrices("v", v, layer.types.w);
    TORCH_CHECK(q.dim() == 4 && q.size(3) == d, "q has the shape ", q.sizes(),
                "; it must be (batch, heads, rows, ", d, ").");
    const int64_t b = q.size(0), h = q.size(1), m = q.size(2);
    TORCH_CHECK(k.dim() == 4 && k.size(0) == b && k.size(3) == d &&
                    (layer.n_low < layer.n || k.size(2) == layer.n),
                "k has the shape ", k.sizes(), "; it must be (", b, ", heads, ",
                layer.n_low < layer.n ? "keys" : std::to_string(layer.n), ", ", d, ").");
    const int64_t n = k.size(2), heads = k.size(1);
    TORCH_CHECK(v.sizes() == k.sizes(), "v has the shape ", v.sizes(), "; it must be that of k, ",
                k.sizes(), ".");
    TORCH_CHECK(h == heads || (heads > 0 && h % heads == 0), "q has ", h, " heads and k ", heads,
                "; as many of q must share each of k.");
    TORCH_CHECK(!is_causal(layer) || m == n, "q has ", m, " rows and k ", n,
                "; causal attention is of as many of both.");
    const std::array<int64_t, 4> shape = {b, h, m, n};
    operands_of(layer, scale, std::nullopt, mask, shape);
}

/* What a compiler does not know is checked when it runs. */
inline void check_known_attention(const LayerEntry &layer, const Tensor &q, const Tensor &k,
                                  const Tensor &v, const std::optional<Tensor> &mask,
                                  double scale) {
    if (are_sizes_known(q, k, v, mask)) {
        check_attention(layer, q, k, v, mask, scale);
    }
}

/* One query of each head: those of the heads that share keys are the rows of one product, which
 * reads the keys and values once. */
inline bool joins_heads(const LayerEntry &layer, const Tensor &q, const Tensor &k) {
    return q.size(2) == 1 && q.size(1) > k.size(1) && !is_causal(layer) &&
           kernel_for(layer, q.size(1) / k.size(1));
}

Tensor attention(const Tensor &q, const Tensor &k, const Tensor &v, int64_t number,
                 const std::optional<Tensor> &mask, double scale) {
    const LayerEntry &layer = attention_numbered(number);
    check_attention(layer, q, k, v, mask, scale);
    const int64_t b = q.size(0), h = q.size(1), m = q.size(2), d = layer.k;
    const int64_t heads = k.size(1), n = k.size(2);
    Tensor y = at::empty_like(q);
    if (y.numel() == 0) {
        return y;
    }
    const bool is_for_keys = layer.n_low <= n && n <= layer.n;
    const bool is_joined = joins_heads(layer, q, k);
    const KernelEntry *kernel = is_for_keys ? kernel_for(layer, is_joined ? h / heads : m) : nullptr;
    if (!kernel) {
        const Tensor plain = attention_plain(layer, q, k, v, mask, scale);
        return plain.strides() == y.strides() ? plain : y.copy_(plain);
    }
    const int64_t group = is_joined ? 1 : h / heads, rows = is_joined ? h / heads : m;
    const std::array<int64_t, 3> products = {b, heads, group};
    const auto shape_of = [&](int64_t length, int64_t columns) {
        return std::array<int64_t, 5>{b, heads, group, length, columns};
    };
    const auto grouped = [&](const Tensor &array) { /* (b, heads, group, rows, columns) */
        const Tensor in = in_groups(array, heads, h / heads);
        return is_joined && in.dim() > array.dim() ? in.transpose(-3, -2) : in;
    };
    ActivationsCall call(layer, *kernel);
    call.arrays[array_x] = matrices_of(grouped(q), shape_of(rows, d));
    call.arrays[array_w] = matrices_of(k.unsqueeze(2), shape_of(n, d));
    call.arrays[array_v] = matrices_of(v.unsqueeze(2), shape_of(n, d));
    const Tensor written = has_dense_rows(y, false) ? y : y.contiguous();
    call.arrays[array_y] = matrices_of(grouped(written), shape_of(rows, d));
    std::optional<Tensor> read;
    if (mask) {
        read = grouped(*mask);
    }
    call.read(scale, std::nullopt, read, shape_of(rows, n));
    call.run(rows, n, products);
    return written.is_same(y) ? y : y.copy_(written);
}

Tensor attention_meta(const Tensor &q, const Tensor &k, const Tensor &v, int64_t number,
                      const std::optional<Tensor> &mask, double scale) {
    check_known_attention(attention_numbered(number), q, k, v, mask, scale);
    return at::empty_like(q);
}

} // namespace
