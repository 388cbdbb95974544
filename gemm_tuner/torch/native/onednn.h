/* Products by oneDNN, with the operators that PyTorch has for Inductor. Those of this library are not
 * what Inductor's passes look for: they take it for granted that they have packed weights themselves. */

namespace {

Tensor onednn_pack(const Tensor &w, int64_t rows) {
    using Pack = Tensor(const Tensor &, std::optional<int64_t>);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                               .typed<Pack>();
    return op.call(w, rows);
}

Tensor onednn_linear(const Tensor &x, const Tensor &packed, const std::optional<Tensor> &bias,
                     int64_t) {
    using Multiply = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &,
                            std::string_view, c10::List<std::optional<at::Scalar>>,
                            std::optional<std::string_view>);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                               .typed<Multiply>();
    // It reads a bias as if its elements lay side by side.
    const std::optional<Tensor> dense = bias ? std::optional(bias->contiguous()) : std::nullopt;
    return op.call(x, packed, dense, "none", c10::List<std::optional<at::Scalar>>(), "");
}

/* The shape of packed weights is that of w; what is packed has no strides. */
Tensor onednn_pack_meta(const Tensor &w, int64_t) { return at::empty_like(w); }

Tensor onednn_linear_meta(const Tensor &x, const Tensor &, const std::optional<Tensor> &, int64_t n) {
    std::vector<c10::SymInt> shape(x.sym_sizes().begin(), x.sym_sizes().end());
    shape.back() = n;
    return at::empty_symint(shape, x.options());
}

} // namespace
