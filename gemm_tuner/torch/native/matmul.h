/* Products of two activations, where they lie: x (..., m, k), and w (..., n, k) or (..., k, n).
 *
 * The dimensions before the last two are those of products, and are broadcast. A kernel steps along
 * two of them, in each array by a stride of its own. Neighbours that are one dimension in all arrays
 * are joined first, and each product along those that are left beyond two is a call. */

namespace {

using Lengths = c10::SmallVector<int64_t, 6>;

enum Array { array_x, array_w, array_y, array_other, array_v, array_count };
using Addresses = std::array<char *, array_count>;

/* Matrices (..., rows, columns): where the first lies, and the strides of the dimensions before. */
struct Matrices {
    Tensor holder; /* keeps a copy alive, if one was needed */
    int64_t leading_dimension = 0;
    Lengths strides;
};

/* One dimension of products: how many, and from one to the next in each array, in elements. */
struct Dimension {
    int64_t length;
    std::array<int64_t, array_count> strides;
};

inline at::IntArrayRef before_matrices(const Tensor &tensor) {
    return tensor.sizes().slice(0, static_cast<size_t>(tensor.dim() - 2));
}

inline void check_matrices(const char *name, const Tensor &given, at::ScalarType type) {
    TORCH_CHECK(given.dim() >= 2, name, " has the shape ", given.sizes(),
                "; it must have at least two dimensions.");
    TORCH_CHECK(given.scalar_type() == type, name, " is of ", given.scalar_type(),
                ", but the kernels of this product read ", type, ".");
}

/* Whether rows are dense, and lie apart; those of what the epilogue reads may be the same one. */
inline bool has_dense_rows(const Tensor &one, bool may_repeat) {
    const int64_t rows = one.size(-2), columns = one.size(-1);
    return (columns <= 1 || one.stride(-1) == 1) &&
           (rows <= 1 || one.stride(-2) >= columns || (may_repeat && one.stride(-2) == 0));
}

inline Matrices matrices_of(const Tensor &given, at::IntArrayRef shape, bool may_repeat = false) {
    Tensor shown = given.expand(shape);
    if (!has_dense_rows(shown, may_repeat)) {
        const Tensor matrices = at::atleast_2d(given);
        Lengths own(before_matrices(matrices).begin(), before_matrices(matrices).end());
        own.append(shape.end() - 2, shape.end());
        shown = matrices.expand(own).contiguous().expand(shape); /* those it has, each once */
    }
    const at::IntArrayRef strides = shown.strides();
    Matrices found{shown, shown.stride(-2), Lengths(strides.begin(), strides.end() - 2)};
    return found;
}

using Arrays = std::array<Matrices, array_count>;

inline std::vector<Dimension> dimensions_of(at::IntArrayRef lengths, const Arrays &arrays) {
    std::vector<Dimension> found;
    for (size_t place = 0; place < lengths.size(); place++) {
        if (lengths[place] == 1) {
            continue;
        }
        Dimension one{lengths[place], {}};
        bool is_joined = !found.empty();
        for (size_t array = 0; array < array_count; array++) {
            const Lengths &strides = arrays[array].strides;
            one.strides[array] = strides.empty() ? 0 : strides[place];
            is_joined = is_joined && found.back().strides[array] == one.strides[array] * one.length;
        }
        if (is_joined) {
            one.length *= found.back().length;
            found.pop_back();
        }
        found.push_back(one);
    }
    return found;
}

inline char *memory_of(const Tensor &tensor) {
    return tensor.defined() ? const_cast<char *>(static_cast<const char *>(tensor.const_data_ptr()))
                            : nullptr;
}

/* Products of activations, or attention: the kernel, its arrays, and what its epilogue reads. */
struct ActivationsCall {
    const LayerEntry &layer;
    const KernelEntry &kernel;
    Arrays arrays;
    gemm_tuner_args args = {};
    gemm_tuner_operand operands[max_operands] = {};
    int64_t head_strides[max_operands] = {};
    size_t place_of_other = max_operands;
    float factor = 1;
    Tensor dense_bias;
    std::array<int64_t, array_count> element_bytes = {};

    ActivationsCall(const LayerEntry &of_layer, const KernelEntry &of_kernel)
        : layer(of_layer), kernel(of_kernel) {}
    ActivationsCall(const ActivationsCall &) = delete; /* its arguments point into it */

    /* Take what the epilogue reads; `other` is broadcast to the result of the products. */
    void read(double scale, const std::optional<Tensor> &bias, const std::optional<Tensor> &other,
              at::IntArrayRef shape) {
        factor = static_cast<float>(scale);
        for (size_t place = 0; place < layer.operands.size(); place++) {
            gemm_tuner_operand &operand = operands[place];
            if (layer.operands[place] == Step::scale) {
                operand.elements = &factor;
            } else if (layer.operands[place] == Step::bias) {
                dense_bias = bias->contiguous();
                operand.elements = dense_bias.const_data_ptr();
            } else {
                arrays[array_other] = matrices_of(*other, shape, true);
                operand.leading_dimension = arrays[array_other].leading_dimension;
                place_of_other = place;
            }
        }
    }

    /* Compute the products, once all arrays are known. */
    void run(int64_t m, int64_t n, at::IntArrayRef products) {
        Addresses at;
        for (size_t array = 0; array < array_count; array++) {
            const Tensor &holder = arrays[array].holder;
            at[array] = memory_of(holder);
            element_bytes[array] = holder.defined() ? holder.element_size() : 0;
        }
        args.size_bytes = sizeof args;
        args.m = m;
        args.n = n;
        args.x_leading_dimension = arrays[array_x].leading_dimension;
        args.w_leading_dimension = arrays[array_w].leading_dimension;
        args.v_leading_dimension = arrays[array_v].leading_dimension;
        args.y_leading_dimension = arrays[array_y].leading_dimension;
        args.operands = operands;
        args.operand_count = layer.operands.size();
        args.operand_head_strides = head_strides;
        const std::vector<Dimension> dimensions = dimensions_of(products, arrays);
        run(dimensions.data(), dimensions.size(), at);
    }

  private:
    /* Compute the products of these dimensions. */
    void run(const Dimension *first, size_t count, const Addresses &at) {
        if (count > 2) {
            for (int64_t product = 0; product < first->length; product++) {
                run(first + 1, count - 1, moved(at, *first, product));
            }
            return;
        }
        const Dimension one{1, {}};
        const Dimension &batch = count > 0 ? first[0] : one, &heads = count > 1 ? first[1] : one;
        args.batch = batch.length;
        args.heads = heads.length;
        args.x = at[array_x];
        args.x_batch_stride = batch.strides[array_x];
        args.x_head_stride = heads.strides[array_x];
        args.w = at[array_w];
        args.w_batch_stride = batch.strides[array_w];
        args.w_head_stride = heads.strides[array_w];
        args.v = at[array_v];
        args.v_batch_stride = batch.strides[array_v];
        args.v_head_stride = heads.strides[array_v];
        args.y = at[array_y];
        args.y_batch_stride = batch.strides[array_y];
        args.y_head_stride = heads.strides[array_y];
        if (place_of_other < max_operands) {
            operands[place_of_other].elements = at[array_other];
            operands[place_of_other].batch_stride = batch.strides[array_other];
            head_strides[place_of_other] = heads.strides[array_other];
        }
        run_watched(layer, kernel, args);
    }

    Addresses moved(Addresses at, const Dimension &along, int64_t products) const {
        for (size_t array = 0; array < array_count; array++) {
            at[array] += products * along.strides[array] * element_bytes[array];
        }
        return at;
    }
};

/* What the steps of a layer read, checked: the result of its products has this shape. */
inline Operands operands_of(const LayerEntry &layer, double scale,
                            const std::optional<Tensor> &bias, const std::optional<Tensor> &other,
                            at::IntArrayRef shape) {
    Operands given;
    const char *name_of_other = layer.is_attention() ? "mask" : "other";
    const at::ScalarType type = layer.types.operand();
    for (const Step step : layer.operands) {
        const std::optional<Tensor> &array = step == Step::bias ? bias : other;
        given.push_back({step == Step::scale || !array ? nullptr : &*array, scale});
        if (step == Step::scale) {
            continue;
        }
        const char *name = step == Step::bias ? "bias" : name_of_other;
        const Tensor &read = array_of(name, given.back());
        TORCH_CHECK(read.scalar_type() == type, name, " is of ", read.scalar_type(),
                    ", but the kernels of this product read ", type, ".");
        TORCH_CHECK(step != Step::add || at::is_expandable_to(read.sizes(), shape), name,
                    " has the shape ", read.sizes(), "; it must be broadcast to that of ",
                    layer.is_attention() ? "scores" : "y", ", ", shape, ".");
        TORCH_CHECK(step != Step::bias || (read.dim() == 1 && read.size(0) == shape.back()),
                    "bias must be ", shape.back(), " elements.");
    }
    return given;
}

/* What the kernels compute, for rows that none of them is for. */
inline Tensor matmul_plain(const LayerEntry &layer, const Tensor &x, const Tensor &w,
                           const Operands &given, at::IntArrayRef shape) {
    Tensor y = at::matmul(x, layer.w == Weights::kn ? w : w.transpose(-2, -1));
    size_t read = 0;
    for (const Step step : layer.steps) {
        Operand operand = reads_operand(step) ? given[read++] : Operand{};
        Tensor other;
        if (step == Step::add) {
            other = operand.array->expand(shape);
            operand.array = &other;
        }
        y = apply_step(step, y, operand);
    }
    return y.contiguous();
}

const LayerEntry &matmul_numbered(int64_t number) {
    const LayerEntry &layer = layer_numbered(number);
    TORCH_CHECK(layer.w == Weights::nk || layer.w == Weights::kn, "layer ", number,
                " is called by ", layer.is_attention() ? "attention." : "linear.");
    return layer;
}

/* The rows and columns of w. */
inline std::array<int64_t, 2> sizes_of_w(const LayerEntry &layer) {
    if (layer.w == Weights::kn) {
        return {layer.k, layer.n};
    }
    return {layer.n, layer.k};
}

/* The dimensions of products, once the shapes and types of x and w are known to be right. */
inline at::DimVector checked_products(const LayerEntry &layer, const Tensor &x, const Tensor &w) {
    check_matrices("x", x, layer.types.x);
    check_matrices("w", w, layer.types.w);
    const auto [w_rows, w_columns] = sizes_of_w(layer);
    TORCH_CHECK(x.size(-1) == layer.k, "x has the shape ", x.sizes(),
                "; its last dimension must be ", layer.k, ".");
    TORCH_CHECK(w.size(-2) == w_rows && w.size(-1) == w_columns, "w has the shape ", w.sizes(),
                "; its last two dimensions must be ", w_rows, " and ", w_columns, ".");
    return at::infer_size_dimvector(before_matrices(x), before_matrices(w));
}

inline Lengths shape_with(const at::DimVector &products, int64_t rows, int64_t columns) {
    Lengths shape(products.begin(), products.end());
    shape.push_back(rows);
    shape.push_back(columns);
    return shape;
}

/* Compute y (..., m, n), whose memory is there and not empty, by a kernel. */
inline void multiply(const LayerEntry &layer, const KernelEntry &kernel, const Tensor &x,
                     const Tensor &w, const Tensor &y, const at::DimVector &products,
                     const std::optional<Tensor> &bias = std::nullopt,
                     const std::optional<Tensor> &other = std::nullopt, double scale = 1.0) {
    const auto [w_rows, w_columns] = sizes_of_w(layer);
    const int64_t m = x.size(-2);
    const Lengths shape = shape_with(products, m, layer.n);
    ActivationsCall call(layer, kernel);
    call.arrays[array_x] = matrices_of(x, shape_with(products, m, layer.k));
    call.arrays[array_w] = matrices_of(w, shape_with(products, w_rows, w_columns));
    call.arrays[array_y] = matrices_of(y, shape);
    call.read(scale, bias, other, shape);
    call.run(m, layer.n, products);
}

/* Return y (..., m, n); `bias` is of n elements, and `other` is broadcast to y. */
Tensor matmul(const Tensor &x, const Tensor &w, int64_t number, const std::optional<Tensor> &bias,
              const std::optional<Tensor> &other, double scale) {
    const LayerEntry &layer = matmul_numbered(number);
    const at::DimVector products = checked_products(layer, x, w);
    const Lengths shape = shape_with(products, x.size(-2), layer.n);
    const Operands given = operands_of(layer, scale, bias, other, shape);
    const bool is_empty = c10::multiply_integers(shape) == 0;
    const KernelEntry *kernel = is_empty ? nullptr : kernel_for(layer, x.size(-2));
    if (!is_empty && !kernel) {
        return matmul_plain(layer, x, w, given, shape);
    }
    Tensor y(at::detail::empty_cpu(shape, layer.types.y));
    if (!is_empty) {
        multiply(layer, *kernel, x, w, y, products, bias, other, scale);
    }
    return y;
}

/* What a compiler does not know is checked when it runs. */
Tensor matmul_meta(const Tensor &x, const Tensor &w, int64_t number,
                   const std::optional<Tensor> &bias, const std::optional<Tensor> &other,
                   double scale) {
    const LayerEntry &layer = matmul_numbered(number);
    if (are_sizes_known(x, w, bias, other)) {
        const at::DimVector products = checked_products(layer, x, w);
        operands_of(layer, scale, bias, other, shape_with(products, x.size(-2), layer.n));
    }
    TORCH_CHECK(x.dim() >= 2 && w.dim() >= 2, "x and w must have at least two dimensions.");
    const auto before = [](const Tensor &one) {
        return one.sym_sizes().slice(0, static_cast<size_t>(one.dim() - 2));
    };
    c10::SymDimVector shape = at::infer_size_symdimvector(before(x), before(w));
    shape.push_back(x.sym_size(-2));
    shape.push_back(layer.n);
    return at::empty_symint(shape, x.options().dtype(layer.types.y));
}

} // namespace
