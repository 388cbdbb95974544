/* Arrays of PyTorch as a kernel reads them, in place where it can: rows, and operands of steps. */

namespace {

/* Rows of a tensor (..., columns), or of each product of a batch (batch, rows, columns). */
struct Rows {
    Tensor holder; /* keeps a copy alive, if one was needed */
    const void *elements;
    int64_t count, leading_dimension;
    int64_t batch = 1, batch_stride = 0;
};

inline void check_rows(const char *name, const Tensor &given, int64_t columns,
                       at::ScalarType type) {
    TORCH_CHECK(given.dim() >= 1 && given.size(-1) == columns, name, " has the shape ",
                given.sizes(), "; its last dimension must be ", columns, ".");
    TORCH_CHECK(given.scalar_type() == type, name, " is of ", given.scalar_type(),
                ", but the kernels of this layer read ", type, ".");
}

inline Rows rows_of(const char *name, const Tensor &given, int64_t columns, at::ScalarType type) {
    check_rows(name, given, columns, type);
    const int64_t count = columns ? given.numel() / columns : 0;
    const bool is_matrix = given.dim() == 2;
    if (is_matrix && given.stride(1) == 1 && (count <= 1 || given.stride(0) >= columns)) {
        return {Tensor(), given.const_data_ptr(), count, count <= 1 ? columns : given.stride(0)};
    }
    if (given.is_contiguous()) {
        return {Tensor(), given.const_data_ptr(), count, columns};
    }
    Tensor copy = given.contiguous();
    const void *elements = copy.const_data_ptr();
    return {std::move(copy), elements, count, columns};
}

inline void check_batch(const char *name, const Tensor &given, int64_t batch, int64_t columns,
                        at::ScalarType type) {
    check_rows(name, given, columns, type);
    TORCH_CHECK(given.dim() == 3 && given.size(0) == batch, name, " has the shape ",
                given.sizes(), "; there are weights of ", batch, " products, so it must be (", batch,
                ", rows, ", columns, ").");
}

/* The rows of each product; all may read the same ones, as those of an expanded tensor. */
inline Rows batch_of(const char *name, const Tensor &given, int64_t batch, int64_t columns,
                     at::ScalarType type) {
    check_batch(name, given, batch, columns, type);
    const int64_t count = given.size(1);
    const bool is_read = given.stride(2) == 1 && (count <= 1 || given.stride(1) >= columns);
    Tensor holder = is_read ? given : given.contiguous();
    const void *elements = holder.const_data_ptr();
    const int64_t leading = count <= 1 ? columns : holder.stride(1), stride = holder.stride(0);
    return {std::move(holder), elements, count, leading, batch, stride};
}

/* Whether each product has a vector of its own, or all have one. */
inline bool checked_own_vector(const char *name, const Tensor &given, int64_t n,
                               at::ScalarType type, std::optional<int64_t> batch) {
    const bool is_own = batch && given.dim() == 2 && given.size(0) == *batch;
    TORCH_CHECK((is_own || given.dim() == 1) && given.size(-1) == n && given.scalar_type() == type,
                name, " must be ", n, " elements of ", type,
                batch ? ", or as many for each product." : ".");
    return is_own;
}

inline bool is_size_known(const Tensor &tensor) {
    return !tensor.defined() || !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

inline bool is_size_known(const std::optional<Tensor> &tensor) {
    return !tensor || is_size_known(*tensor);
}

/* Whether a compiler that follows the call has numbers for all sizes. */
template <typename... Tensors> bool are_sizes_known(const Tensors &...tensors) {
    return (is_size_known(tensors) && ...);
}

/* The operands of a call as the kernel reads them; what they point to is kept here. */
struct ReadOperands {
    gemm_tuner_operand elements[max_operands] = {};
    float floats[max_operands];
    int32_t integers[max_operands];
    Tensor holders[max_operands];
    Rows other;

    void read_vector(size_t place, const char *name, const Tensor &given, int64_t n,
                     at::ScalarType type, std::optional<int64_t> batch) {
        const bool is_own = checked_own_vector(name, given, n, type, batch);
        holders[place] = given.contiguous();
        elements[place].elements = holders[place].const_data_ptr();
        elements[place].batch_stride = is_own ? n : 0;
    }

    void read_rows(size_t place, Rows rows) {
        other = std::move(rows);
        elements[place].elements = other.elements;
        elements[place].leading_dimension = other.leading_dimension;
        elements[place].batch_stride = other.batch_stride;
    }

    void read_scale(size_t place, const Operand &given) {
        floats[place] = static_cast<float>(number_of(given));
        elements[place].elements = &floats[place];
    }

    void read_zero_point(size_t place, const Operand &given) {
        integers[place] = static_cast<int32_t>(number_of(given));
        elements[place].elements = &integers[place];
    }
};

} // namespace
