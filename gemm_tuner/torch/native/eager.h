/* What modules call in eager mode: a kernel where one takes the call, and PyTorch's own operator for
 * all that is recorded, traced, transformed, cast, or of other sizes, types and memory. */

namespace {

/* A tensor of plain memory on the CPU: no wrapper, no view that is negated or conjugated. */
bool is_plain(const Tensor &tensor, at::ScalarType type) {
    constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                         c10::DispatchKey::AutocastCPU,
                                         c10::DispatchKey::ADInplaceOrView});
    return (tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0 && tensor.scalar_type() == type &&
           !is_recorded(tensor);
}

bool is_taken(const LayerEntry &layer, const Tensor &x, const Tensor &weight,
              const std::optional<Tensor> &bias) {
    const bool wants_bias = !layer.operands.empty();
    return is_plain(x, layer.types.x) && is_plain(weight, layer.types.x) &&
           (!bias || (is_plain(*bias, layer.types.x) && bias->dim() == 1 &&
                      bias->size(0) == layer.n)) && bias.has_value() == wants_bias &&
           weight.dim() == 2 && weight.size(0) == layer.n && weight.size(1) == layer.k &&
           x.dim() >= 1 && x.size(-1) == layer.k &&
           kernel_for(layer, x.numel() / layer.k) &&
           !at::autocast::is_autocast_enabled(at::kCPU);
}

/* The number in the place of a layer's of weights that onednn_pack packed. */
constexpr int64_t by_onednn = -1;

Tensor onednn_or_plain(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias,
                       const Tensor &packed) {
    if (!is_plain(x, at::kFloat) || !is_plain(weight, at::kFloat) ||
        weight.sizes() != packed.sizes() || /* it may be another view of the same memory */
        (bias && (!is_plain(*bias, at::kFloat) || bias->dim() != 1 ||
                  bias->size(0) != weight.size(0))) ||
        x.dim() < 2 || x.numel() == 0 || x.size(-1) != weight.size(1) ||
        at::autocast::is_autocast_enabled(at::kCPU)) {
        return at::linear(x, weight, bias);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return onednn_linear(x, packed, bias, weight.size(0));
}

/* Where the order of additions is fixed, what no kernel takes is refused, unless it is recorded. */
Tensor linear_or_plain(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias,
                       const Tensor &packed, int64_t number, bool is_fixed) {
    if (number == by_onednn) {
        return onednn_or_plain(x, weight, bias, packed);
    }
    const LayerEntry &layer = layer_numbered(number);
    if (!is_taken(layer, x, weight, bias)) {
        TORCH_CHECK_VALUE(!is_fixed || is_recorded(x) || is_recorded(weight) || is_recorded(bias),
                          "no kernel of a layer with the reduction 'fixed' takes this call; call "
                          "it with plain tensors, and the bias that it had.");
        return at::linear(x, weight, bias);
    }
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("gemm_tuner::linear", "")
                               .typed<decltype(linear)>();
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, packed, bias, number, std::nullopt, std::nullopt);
}

/* Arrays that a kernel reads where they lie. */
bool is_read(const Tensor &array, at::ScalarType type) {
    return array.dim() >= 2 && is_plain(array, type) && array.numel() && has_dense_rows(array, false);
}

/* Whether kernels of a layer read x, and w (..., k, n), where they lie. */
bool is_product_read(const LayerEntry &layer, const Tensor &x, const Tensor &w) {
    const bool is_kn = layer.w == Weights::kn;
    return (is_kn || layer.w == Weights::nk) && layer.operands.empty() && is_plain(w, layer.types.w) &&
           w.dim() >= 2 && is_read(is_kn ? w : w.mT(), layer.types.w) && is_read(x, layer.types.x) &&
           x.size(-1) == layer.k && w.size(-2) == layer.k && w.size(-1) == layer.n;
}

/* Return x @ w, as `bmm` does it or as `matmul` does: `bmm` broadcasts nothing. */
Tensor matmul_or_plain(const Tensor &x, const Tensor &w, at::IntArrayRef numbers, bool is_bmm) {
    if (is_bmm && (x.dim() != 3 || w.dim() != 3 || x.sym_size(0) != w.sym_size(0))) {
        return at::bmm(x, w);
    }
    for (const int64_t number : numbers) {
        const LayerEntry &layer = layer_numbered(number);
        if (is_product_read(layer, x, w) && kernel_for(layer, x.size(-2)) &&
            !at::autocast::is_autocast_enabled(at::kCPU) &&
            at::is_expandable_to(before_matrices(w), before_matrices(x))) {
            static const auto op = c10::Dispatcher::singleton()
                                       .findSchemaOrThrow("gemm_tuner::matmul", "")
                                       .typed<decltype(matmul)>();
            at::AutoDispatchBelowADInplaceOrView below;
            return op.call(x, layer.w == Weights::kn ? w : w.mT(), number, std::nullopt,
                           std::nullopt, 1.0);
        }
    }
    return is_bmm ? at::bmm(x, w) : at::matmul(x, w);
}

/* Return what `torch.nn.functional.grouped_mm` does: the rows of x before ends[0] times w[0], those
 * from there before ends[1] times w[1], and so on. */
Tensor grouped_or_plain(const Tensor &x, const Tensor &w, const Tensor &ends,
                        at::IntArrayRef numbers) {
    const bool is_usual = !at::autocast::is_autocast_enabled(at::kCPU) && x.dim() == 2 &&
                          w.dim() == 3 && is_plain(ends, at::kInt) &&
                          are_ends(ends, w.size(0), x.size(0));
    for (const int64_t number : is_usual ? numbers : at::IntArrayRef()) {
        const LayerEntry &layer = layer_numbered(number);
        if (is_product_read(layer, x, w)) {
            at::AutoDispatchBelowADInplaceOrView below;
            return multiply_groups(layer, x, layer.w == Weights::kn ? w : w.mT(), ends);
        }
    }
    return at::_grouped_mm(x, w, ends);
}

bool has_step(const LayerEntry &layer, Step step) {
    return std::find(layer.steps.begin(), layer.steps.end(), step) != layer.steps.end();
}

/* A mask says which keys are seen, or is added to the scores; PyTorch refuses one of one dimension. */
bool is_mask_taken(const LayerEntry &layer, const Tensor &mask, at::IntArrayRef scores) {
    return (is_plain(mask, at::kBool) || is_plain(mask, layer.types.operand())) &&
           mask.dim() >= 2 && at::is_expandable_to(mask.sizes(), scores);
}

bool is_attention_taken(const LayerEntry &layer, const Tensor &q, const Tensor &k, const Tensor &v,
                        const std::optional<Tensor> &mask, bool is_causal, bool enable_gqa) {
    if (!layer.is_attention() || !has_step(layer, Step::scale) ||
        has_step(layer, Step::causal) != is_causal || has_step(layer, Step::add) != mask.has_value() ||
        q.dim() != 4 || k.dim() != 4 || !is_read(q, layer.types.x) || !is_read(k, layer.types.w) ||
        !is_read(v, layer.types.w)) {
        return false;
    }
    const int64_t m = q.size(2), n = k.size(2), heads = k.size(1);
    const std::array<int64_t, 4> scores = {q.size(0), q.size(1), m, n};
    return n == layer.n && q.size(3) == layer.k && k.size(3) == layer.k && v.sizes() == k.sizes() &&
           q.size(0) == k.size(0) &&
           (q.size(1) == heads || (enable_gqa && q.size(1) % heads == 0)) &&
           (!is_causal || m == n) && (joins_heads(layer, q, k) || kernel_for(layer, m)) &&
           (!mask || is_mask_taken(layer, *mask, scores));
}

/* Return what scaled_dot_product_attention does. */
Tensor attention_or_plain(const Tensor &q, const Tensor &k, const Tensor &v,
                          at::IntArrayRef numbers, const std::optional<Tensor> &mask,
                          double dropout, bool is_causal, std::optional<double> scale,
                          bool enable_gqa) {
    const bool is_usual = dropout == 0 && !at::autocast::is_autocast_enabled(at::kCPU);
    for (const int64_t number : is_usual ? numbers : at::IntArrayRef()) {
        const LayerEntry &layer = layer_numbered(number);
        if (!is_attention_taken(layer, q, k, v, mask, is_causal, enable_gqa)) {
            continue;
        }
        std::optional<Tensor> added = mask;
        if (mask && mask->scalar_type() == at::kBool) {
            added = at::zeros(mask->sizes(), q.options()).masked_fill_(mask->logical_not(), -INFINITY);
        }
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("gemm_tuner::attention", "")
                                   .typed<decltype(attention)>();
        at::AutoDispatchBelowADInplaceOrView below;
        const Tensor y = op.call(q, k, v, number, added,
                                 scale.value_or(1 / std::sqrt(static_cast<double>(layer.k))));
        // A mask of three dimensions keeps PyTorch from its kernel whose y lies as q does.
        return mask && mask->dim() == 3 ? y.contiguous() : y;
    }
    return at::scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale, enable_gqa);
}

} // namespace
