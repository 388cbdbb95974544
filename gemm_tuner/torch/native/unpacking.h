/* The weights that were packed.
 *
 * To pack weights of floats is to move elements and to add zeros. So marks that are packed in their
 * place, 1 for the first element, 2 for the next, say where each of them went. A mark that an element
 * has no room for is packed in pieces. All pieces are numbers and no NaN, whose bits nothing changes. */

namespace {

template <typename Element> constexpr int mark_bits = sizeof(Element) == 4 ? 30 : 14;

template <typename Element>
Tensor unpack_elements(const LayerEntry &layer, const Tensor &packed) {
    const KernelEntry *packer = nullptr; /* of the format that comes first */
    const auto count = static_cast<uint64_t>(layer.n) * static_cast<uint64_t>(layer.k);
    TORCH_CHECK(count <= UINT32_MAX, "layer ", layer.number, " has ", count,
                " weights, too many to be unpacked.");
    int64_t size_bytes = layer.packed_bytes;
    for (const KernelEntry &kernel : layer.kernels) {
        if (kernel.packed_offset > 0) {
            size_bytes = std::min(size_bytes, kernel.packed_offset);
        } else if (kernel.is_packer) {
            packer = &kernel;
        }
    }
    const auto size = static_cast<size_t>(size_bytes) / sizeof(Element);
    std::vector<uint32_t> marks(size);
    {
        const Tensor pieces(at::detail::empty_cpu({layer.n, layer.k}, layer.types.w));
        auto *piece = static_cast<Element *>(pieces.mutable_data_ptr());
        const Tensor moved = empty_weights(size_bytes);
        auto *memory = static_cast<char *>(moved.mutable_data_ptr());
        std::memset(memory, 0, static_cast<size_t>(size_bytes));
        gemm_tuner_weights weights = {};
        weights.size_bytes = sizeof weights;
        weights.elements = piece;
        weights.leading_dimension = layer.k;
        for (int shift = 0; count >> shift; shift += mark_bits<Element>) {
            constexpr uint64_t mask = (uint64_t{1} << mark_bits<Element>)-1;
            for (uint64_t at = 0; at < count; at++) {
                piece[at] = static_cast<Element>((at + 1) >> shift & mask);
            }
            TORCH_CHECK(pack_kernel(*packer, weights, memory) == GEMM_TUNER_OK, "a kernel of layer ",
                        layer.number, " refused to pack; tune it again.");
            const auto *found = reinterpret_cast<const Element *>(memory);
            for (size_t at = 0; at < size; at++) {
                marks[at] |= static_cast<uint32_t>(found[at]) << shift;
            }
        }
    }
    Tensor w(at::detail::empty_cpu({layer.n, layer.k}, layer.types.w));
    auto *elements = static_cast<Element *>(w.mutable_data_ptr());
    const auto *read = static_cast<const Element *>(packed.const_data_ptr());
    for (size_t at = 0; at < size; at++) {
        const uint32_t mark = marks[at];
        TORCH_CHECK(mark <= count, "layer ", layer.number, " packs no plain elements.");
        if (mark) {
            elements[mark - 1] = read[at];
        }
    }
    return w;
}

/* Weights (n, k) as they were given to `pack`, if kernels keep their elements as they are: where they
 * do not, what is returned is not what was packed. */
Tensor unpack(const Tensor &packed, int64_t number) {
    const LayerEntry &layer = linear_numbered(number);
    const Tensor read = checked_packed(layer, packed);
    TORCH_CHECK(read.dim() == 1, "packed must be the weights of one product, not of a batch.");
    switch (layer.types.w) {
    case at::kFloat:
        return unpack_elements<uint32_t>(layer, read);
    case at::kBFloat16:
        return unpack_elements<uint16_t>(layer, read);
    default:
        TORCH_CHECK(false, "layer ", number, " has weights of ", layer.types.w,
                    "; those of float and bfloat16 are unpacked.");
    }
}

} // namespace
