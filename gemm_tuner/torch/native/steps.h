/* The types of a layer, the steps of its epilogue, and how PyTorch's own operators compute them. */

constexpr int max_steps = 12, step_kinds = 19, type_kinds = 12, weights_kinds = 4;

namespace {

/* The steps of an epilogue; those with parameters have the default ones of the epilogue table. */
enum class Step : int32_t {
    bias,
    add,
    relu,
    leaky_relu,
    clamp,
    hardswish,
    sigmoid,
    tanh,
    silu,
    gelu_erf,
    gelu_tanh,
    elu,
    mish,
    x_zero_point,
    channel_scale,
    scale,
    y_zero_point,
    clamp_to_7_bits, /* clamp:0:127 */
    causal,          /* of attention */
};
static_assert(static_cast<int>(Step::causal) + 1 == step_kinds);

constexpr size_t max_operands = 6;

bool reads_operand(Step step) {
    switch (step) {
    case Step::bias:
    case Step::add:
    case Step::x_zero_point:
    case Step::channel_scale:
    case Step::scale:
    case Step::y_zero_point:
        return true;
    default:
        return false;
    }
}

/* The types of x, w and y, and of the vectors and matrices of the epilogue. */
struct Types {
    at::ScalarType x, w, y;
    at::ScalarType operand() const { return c10::isIntegralType(y, false) ? at::kFloat : y; }
    bool is_quantised() const { return c10::isIntegralType(x, false); }
    bool is_weight_only() const { return !is_quantised() && c10::isIntegralType(w, false); }
    /* Weights of 4 bits are unsigned, and lie two in a byte; there are none of unsigned bytes. */
    bool has_4_bits() const { return is_weight_only() && w == at::kByte; }
    int64_t elements_per_byte() const { return has_4_bits() ? 2 : 1; }
};
constexpr Types type_table[] = {
    {at::kFloat, at::kFloat, at::kFloat}, {at::kBFloat16, at::kBFloat16, at::kBFloat16},
    {at::kByte, at::kChar, at::kFloat},   {at::kByte, at::kChar, at::kByte},
    {at::kByte, at::kChar, at::kChar},    {at::kChar, at::kChar, at::kFloat},
    {at::kChar, at::kChar, at::kByte},    {at::kChar, at::kChar, at::kChar},
    {at::kFloat, at::kChar, at::kFloat},  {at::kBFloat16, at::kChar, at::kBFloat16},
    {at::kFloat, at::kByte, at::kFloat},  {at::kBFloat16, at::kByte, at::kBFloat16},
};
static_assert(std::size(type_table) == type_kinds);

/* How a kernel gets w: packed ahead of calls, or in each call as (n, k) or (k, n), or as the keys of
 * attention, with values. */
enum class Weights : int32_t { packed, nk, kn, keys };

/* What a layer computes; `operands` are the steps that read one. */
struct Chain {
    Types types;
    std::vector<Step> steps, operands;
};

/* What a step reads: an array, or a number. */
struct Operand {
    const Tensor *array = nullptr;
    double number = 0;
};
using Operands = c10::SmallVector<Operand, max_operands>;

const Tensor &array_of(const char *name, const Operand &operand) {
    TORCH_CHECK(operand.array, name, " must be given.");
    return *operand.array;
}

void check_number(const Operand &operand) {
    TORCH_CHECK(!operand.array || operand.array->numel() == 1,
                "a scale or a zero point of x or y is one number.");
}

double number_of(const Operand &operand) {
    if (!operand.array) {
        return operand.number;
    }
    const Tensor &array = *operand.array;
    check_number(operand);
    switch (array.scalar_type()) { /* item() takes longer than a small product */
    case at::kLong:
        return static_cast<double>(*array.const_data_ptr<int64_t>());
    case at::kInt:
        return *array.const_data_ptr<int32_t>();
    default:
        return array.item<double>();
    }
}

const Tensor &checked_other(const Operand &operand, at::IntArrayRef shape) {
    const Tensor &other = array_of("other", operand);
    TORCH_CHECK(other.sizes() == shape, "other must have the shape of y, ", shape, ".");
    return other;
}

Tensor apply_step(Step step, const Tensor &y, const Operand &operand) {
    switch (step) {
    case Step::bias: {
        const Tensor &bias = array_of("bias", operand);
        return at::add(y, bias.dim() == 2 ? bias.unsqueeze(1) : bias);
    }
    case Step::add:
        return at::add(y, checked_other(operand, y.sizes()));
    case Step::relu:
        return at::relu(y);
    case Step::leaky_relu:
        return at::leaky_relu(y);
    case Step::clamp:
        return at::clamp(y, -1, 1);
    case Step::hardswish:
        return at::hardswish(y);
    case Step::sigmoid:
        return at::sigmoid(y);
    case Step::tanh:
        return at::tanh(y);
    case Step::silu:
        return at::silu(y);
    case Step::gelu_erf:
        return at::gelu(y);
    case Step::gelu_tanh:
        return at::gelu(y, "tanh");
    case Step::elu:
        return at::elu(y);
    case Step::mish:
        return at::mish(y);
    case Step::x_zero_point: /* taken off x before */
        return y;
    case Step::channel_scale:
        return at::mul(y, array_of("channel_scale", operand).to(y.scalar_type()));
    case Step::scale:
        return at::mul(y, number_of(operand));
    case Step::y_zero_point:
        return at::add(at::round(y), number_of(operand));
    case Step::clamp_to_7_bits:
        return at::clamp(y, 0, 127);
    case Step::causal: /* PyTorch's attention hides keys itself */
        break;
    }
    TORCH_CHECK(false, "a step of number ", static_cast<int>(step), " is not known.");
}

/* The product of bytes as floats, the zero point taken off x. */
Tensor product_of_bytes(const Chain &layer, const Tensor &x, const Operands &operands,
                        const Tensor &w) {
    Tensor floats = x.to(at::kFloat);
    for (size_t place = 0; place < layer.operands.size(); place++) {
        if (layer.operands[place] == Step::x_zero_point) {
            floats = at::sub(floats, number_of(operands[place]));
        }
    }
    return at::linear(floats, w.to(at::kFloat));
}

/* y of floats as it is, and of bytes saturated. */
Tensor saturated(const Tensor &y, at::ScalarType type) {
    switch (type) {
    case at::kByte:
        return at::clamp(y, 0, 255).to(type);
    case at::kChar:
        return at::clamp(y, -128, 127).to(type);
    default:
        return y;
    }
}

void check_plain_weights(int64_t rows, const std::optional<Tensor> &w, int64_t n, int64_t k) {
    TORCH_CHECK(w, "no kernel of this layer is for ", rows,
                " rows, and its plain weights were not given.");
    TORCH_CHECK(w->dim() >= 2 && w->size(-2) == n && w->size(-1) == k, "w must be (", n, ", ", k,
                "), with a batch before if x has one, not ", w->sizes(), ".");
}

/* What the kernels compute, for rows that none of them is for. */
Tensor linear_plain(const Chain &layer, const Tensor &x, const Operands &operands,
                    const Tensor &w) {
    const bool is_batch = w.dim() == 3, is_quantised = layer.types.is_quantised();
    const bool is_affine = !is_batch && !is_quantised && !layer.steps.empty() &&
                           layer.steps[0] == Step::bias;
    size_t read = is_affine;
    Tensor y = is_batch       ? at::bmm(x, w.transpose(1, 2))
               : is_quantised ? product_of_bytes(layer, x, operands, w)
               : is_affine    ? at::linear(x, w, array_of("bias", operands[0]))
                              : at::linear(x, w);
    for (size_t place = is_affine; place < layer.steps.size(); place++) {
        const Step step = layer.steps[place];
        y = apply_step(step, y, reads_operand(step) ? operands[read++] : Operand{});
    }
    return saturated(y, layer.types.y);
}

} // namespace
