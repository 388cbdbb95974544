/* Products of groups of rows, as of experts: those of x (rows, k) before ends[0] times w[0], those
 * from there before ends[1] times w[1], and so on. w (groups, n, k) or (groups, k, n) is read where
 * it lies. */

namespace {

/* Whether `ends` says where each of so many groups of rows ends. */
inline bool are_ends(const Tensor &ends, int64_t groups, int64_t rows) {
    if (ends.dim() != 1 || ends.scalar_type() != at::kInt || ends.size(0) != groups ||
        !ends.is_contiguous()) {
        return false;
    }
    const int32_t *first = ends.const_data_ptr<int32_t>(), *last = first + groups;
    return groups > 0 && *first >= 0 && last[-1] <= rows && std::is_sorted(first, last);
}

/* The products of groups that have rows; the rows behind all groups are zeros. */
inline Tensor multiply_groups(const LayerEntry &layer, const Tensor &x, const Tensor &w,
                              const Tensor &ends) {
    const int32_t *end = ends.const_data_ptr<int32_t>();
    Tensor y(at::detail::empty_cpu({x.size(0), layer.n}, layer.types.y));
    int64_t begin = 0;
    for (int64_t group = 0; group < ends.size(0); group++) {
        const int64_t rows = end[group] - begin;
        const Tensor own_x = x.narrow(0, begin, rows), own_w = w.select(0, group);
        Tensor own_y = y.narrow(0, begin, rows);
        const KernelEntry *kernel = kernel_for(layer, rows);
        if (rows && kernel) {
            multiply(layer, *kernel, own_x, own_w, own_y, {});
        } else if (rows) {
            at::mm_out(own_y, own_x, layer.w == Weights::kn ? own_w : own_w.t());
        }
        begin = end[group];
    }
    y.narrow(0, begin, y.size(0) - begin).zero_();
    return y;
}

/* Refuse what no group can be computed of, by shapes and types alone. */
inline void check_groups(const LayerEntry &layer, const Tensor &x, const Tensor &w) {
    TORCH_CHECK(x.dim() == 2 && w.dim() == 3, "x has the shape ", x.sizes(), ", and w ", w.sizes(),
                "; give (rows, ", layer.k, ") and a matrix for each group.");
    checked_products(layer, x, w);
    TORCH_CHECK(layer.operands.empty(), "layer ", layer.number, " is called by matmul.");
}

Tensor grouped_matmul(const Tensor &x, const Tensor &w, const Tensor &ends, int64_t number) {
    const LayerEntry &layer = matmul_numbered(number);
    check_groups(layer, x, w);
    const Tensor given = ends.to(at::kInt).contiguous();
    if (!are_ends(given, w.size(0), x.size(0))) { /* PyTorch may make something of them */
        return at::_grouped_mm(x, layer.w == Weights::kn ? w : w.mT(), given);
    }
    return multiply_groups(layer, x, w, given);
}

/* What a compiler does not know is checked when it runs. */
Tensor grouped_matmul_meta(const Tensor &x, const Tensor &w, const Tensor &, int64_t number) {
    const LayerEntry &layer = matmul_numbered(number);
    if (are_sizes_known(x, w)) {
        check_groups(layer, x, w);
    }
    TORCH_CHECK(x.dim() == 2, "x must be (rows, columns).");
    const c10::SymInt shape[] = {x.sym_size(0), layer.n};
    return at::empty_symint(shape, x.options().dtype(layer.types.y));
}

} // namespace
