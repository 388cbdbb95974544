/* Packed weights: packing them, and where they lie. */

namespace {

bool is_aligned(const Tensor &packed) {
    return reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % GEMM_TUNER_ALIGNMENT == 0;
}

/* Memory for weights that a call reads from one end to the other: on pages of 2 MiB, where the
 * system has them on request, as the weights of a kernel that was timed alone are. */
Tensor empty_weights(int64_t size_bytes) {
    Tensor packed(at::detail::empty_cpu({size_bytes}, at::kByte));
    constexpr uintptr_t page = uintptr_t{1} << 21;
    const auto begin = reinterpret_cast<uintptr_t>(packed.mutable_data_ptr());
    const uintptr_t first = (begin + page - 1) / page * page;
    const uintptr_t last = (begin + static_cast<uintptr_t>(size_bytes)) / page * page;
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE); /* or go without */
    }
    return packed;
}

/* Packed weights that lie at no multiple of the alignment, such as the constants of a model that
 * AOTInductor has compiled: each is copied once, and the copy stays while the original does. */
struct AlignedCopy {
    c10::weak_intrusive_ptr<c10::StorageImpl> original;
    Tensor copy;
};
std::mutex copying;
std::unordered_map<const void *, AlignedCopy> aligned_copies;

Tensor aligned(const Tensor &packed) {
    const void *elements = packed.const_data_ptr();
    const std::lock_guard lock(copying);
    const auto known = aligned_copies.find(elements);
    if (known != aligned_copies.end()) {
        /* Another storage may have come to the address of one that is gone. */
        const auto original = known->second.original.lock();
        if (original.get() == packed.storage().unsafeGetStorageImpl() &&
            known->second.copy.numel() == packed.numel()) {
            return known->second.copy;
        }
    }
    for (auto one = aligned_copies.begin(); one != aligned_copies.end();) {
        one = one->second.original.expired() ? aligned_copies.erase(one) : std::next(one);
    }
    Tensor copy = empty_weights(packed.numel());
    std::memcpy(copy.mutable_data_ptr(), elements, copy.nbytes());
    aligned_copies.insert_or_assign(
        elements, AlignedCopy{packed.storage().getWeakStorageImpl(), copy});
    return copy;
}

void check_packed(const LayerEntry &layer, const Tensor &packed) {
    const bool is_shaped = packed.dim() == 1 || packed.dim() == 2;
    TORCH_CHECK(packed.scalar_type() == at::kByte && is_shaped &&
                    packed.size(-1) == layer.packed_bytes && packed.is_contiguous(),
                "packed is not what gemm_tuner::pack returned for this layer.");
}

Tensor checked_packed(const LayerEntry &layer, const Tensor &packed) {
    check_packed(layer, packed);
    return is_aligned(packed) ? packed : aligned(packed);
}

struct Packing {
    const KernelEntry *kernel;
    const gemm_tuner_weights *weights;
    char *packed;
    int32_t parts;
    std::atomic<int32_t> status;
};

void pack_parts(int64_t begin, int64_t end, void *context) {
    Packing &job = *static_cast<Packing *>(context);
    for (int64_t part = begin; part < end; part++) {
        const int32_t status = job.kernel->pack_part(job.weights, job.packed,
                                                     static_cast<int32_t>(part), job.parts);
        if (status != GEMM_TUNER_OK) {
            job.status = status;
        }
    }
}

/* Pack the weights in the threads that will read them, so that new memory lies near each. */
int32_t pack_kernel(const KernelEntry &kernel, const gemm_tuner_weights &weights, char *packed) {
    const int32_t parts = count_parts(kernel);
    if (parts == 1 || !kernel.pack_part) {
        return kernel.pack(&weights, packed);
    }
    Packing job{&kernel, &weights, packed, parts, GEMM_TUNER_OK};
    TORCH_CHECK(torch_parallel_for(0, parts, 1, pack_parts, &job) == 0,
                "gemm-tuner: PyTorch could not pack weights in its threads.");
    return job.status;
}

/* Make zeros of the line that each format ends in: a kernel may leave the rest of it as it was, and
 * what is packed is the same each time, and shows nothing of other memory. */
void clear_ends(const LayerEntry &layer, char *packed) {
    const auto clear = [&](int64_t end) {
        const int64_t begin = std::max<int64_t>(0, end - GEMM_TUNER_ALIGNMENT);
        std::memset(packed + begin, 0, static_cast<size_t>(end - begin));
    };
    for (const KernelEntry &kernel : layer.kernels) {
        clear(kernel.packed_offset);
    }
    clear(layer.packed_bytes);
}

/* Pack the weights of one product, in each format that a kernel of the layer reads. */
void pack_product(const LayerEntry &layer, const Tensor &w, const float *scales,
                  const float *zero_points, char *packed) {
    const int64_t elements = layer.types.elements_per_byte();
    const Rows rows = rows_of("w", w, (layer.k + elements - 1) / elements, layer.types.w);
    gemm_tuner_weights weights = {};
    weights.size_bytes = sizeof weights;
    weights.elements = rows.elements;
    weights.leading_dimension = rows.leading_dimension * elements;
    weights.scales = scales;
    weights.float_zero_points = zero_points;
    if (on_pack) {
        on_pack(layer.number, &weights);
    }
    clear_ends(layer, packed);
    for (const KernelEntry &kernel : layer.kernels) {
        if (kernel.is_packer) {
            TORCH_CHECK(pack_kernel(kernel, weights, packed + kernel.packed_offset) ==
                            GEMM_TUNER_OK,
                        "a kernel of layer ", layer.number,
                        " refused the weights; tune it again.");
        }
    }
}

/* What the groups of a layer's weights have, (n, groups); nothing where they have none. */
Tensor of_groups(const char *name, const LayerEntry &layer, const std::optional<Tensor> &given,
                 bool are_wanted) {
    TORCH_CHECK(given.has_value() == are_wanted, "layer ", layer.number,
                given ? " has no " : " needs the ", name, " of its weights.");
    if (!given) {
        return Tensor();
    }
    const int64_t groups = layer.groups();
    TORCH_CHECK(given->dim() == 2 && given->size(0) == layer.n && given->size(1) == groups &&
                    given->scalar_type() == at::kFloat,
                name, " must be (", layer.n, ", ", groups, ") floats, not ", given->sizes(), " of ",
                given->scalar_type(), ".");
    return given->contiguous();
}

const float *floats_or_null(const Tensor &tensor) {
    return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

Tensor pack(const Tensor &w, int64_t size_bytes, int64_t number,
            const std::optional<Tensor> &scales, const std::optional<Tensor> &zero_points) {
    const LayerEntry &layer = linear_numbered(number);
    TORCH_CHECK((w.dim() == 2 || w.dim() == 3) && w.size(-2) == layer.n, "w has the shape ",
                w.sizes(), "; it must be (", layer.n, ", ", layer.k, "), or a batch of these",
                layer.types.has_4_bits() ? ", two elements in a byte." : ".");
    TORCH_CHECK(size_bytes == layer.packed_bytes, "layer ", number, " packs ", layer.packed_bytes,
                " bytes, not ", size_bytes, ".");
    const Tensor factors = of_groups("scales", layer, scales, layer.types.is_weight_only());
    const Tensor offsets = of_groups("zero points", layer, zero_points, layer.types.has_4_bits());
    const bool is_batch = w.dim() == 3;
    const int64_t batch = is_batch ? w.size(0) : 1;
    Tensor packed = empty_weights(batch * size_bytes);
    char *memory = static_cast<char *>(packed.mutable_data_ptr());
    for (int64_t product = 0; product < batch; product++) {
        pack_product(layer, is_batch ? w.select(0, product) : w, floats_or_null(factors),
                     floats_or_null(offsets), memory + product * size_bytes);
    }
    return is_batch ? packed.view({batch, size_bytes}) : packed;
}

} // namespace
