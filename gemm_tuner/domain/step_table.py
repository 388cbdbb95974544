"""The table of epilogue steps, and of the C++ functions that they call.

Adding a step is adding a row; where it calls a function of its own, also a template that defines
it.
"""

from collections.abc import Callable
from math import erfc

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.spelling import (
    Argument,
    OneDnnAlgorithm,
    OneDnnPostOp,
    OnnxOperator,
    PassOperation,
    TorchOperator,
)
from gemm_tuner.domain.step_kind import Array, Namespace, OperandShape, StepKind, VectorFunction

# fmt: off
_MAXIMUM = VectorFunction(name="maximum", part="parts/select")
_MINIMUM = VectorFunction(name="minimum", part="parts/select")
_GREATER = VectorFunction(name="greater", part="parts/select")
_SELECT_BELOW = VectorFunction(name="select_below", part="parts/select")
_SELECT_NEGATIVE = VectorFunction(name="select_negative", part="parts/select",
                                  needs=(_SELECT_BELOW,))
_NEAREST_EVEN = VectorFunction(name="nearest_even", part="parts/quantise")
_MAGNITUDE_OF = VectorFunction(name="magnitude_of", part="parts/transcendental")
_KEEP_NAN = VectorFunction(name="keep_nan", part="parts/transcendental")
_EXPONENTIAL = VectorFunction(name="exponential", part="parts/exponential", constants=10,
                              needs=(_KEEP_NAN,))
_RECIPROCAL = VectorFunction(name="reciprocal", part="parts/exponential", constants=1)
_LOGISTIC = VectorFunction(name="logistic", part="parts/exponential", constants=2, is_long=True,
                           needs=(_MAXIMUM, _MINIMUM, _SELECT_BELOW, _EXPONENTIAL, _RECIPROCAL))
_HYPERBOLIC_TANGENT = VectorFunction(name="hyperbolic_tangent", part="parts/exponential",
                                     constants=3, is_long=True,
                                     needs=(_MAXIMUM, _MINIMUM, _EXPONENTIAL, _RECIPROCAL))
_EXPONENTIAL_MINUS_ONE = VectorFunction(name="exponential_minus_one", part="parts/elu",
                                        constants=2, is_long=True,
                                        needs=(_MAXIMUM, _EXPONENTIAL))
_TANH_OF_SOFTPLUS = VectorFunction(name="tanh_of_softplus", part="parts/mish",
                                   constants=3, is_long=True,
                                   needs=(_MAXIMUM, _MINIMUM, _SELECT_BELOW, _EXPONENTIAL,
                                          _RECIPROCAL))
_GELU = VectorFunction(name="gelu", part="parts/gelu", constants=20,
                       needs=(_MINIMUM, _MAGNITUDE_OF))
_TANH_RISE = VectorFunction(name="tanh_rise", part="parts/gelu")
_ERF_RISE = VectorFunction(name="erf_rise", part="parts/gelu")
# What the weights of a softmax are computed with.
SOFTMAX_FUNCTIONS = (_GREATER, _SELECT_BELOW, _EXPONENTIAL)
# fmt: on

# The parts that define them, in the order in which a source has them.
FUNCTION_PARTS = (
    "parts/quantise",
    "parts/select",
    "parts/transcendental",
    "parts/exponential",
    "parts/elu",
    "parts/mish",
    "parts/gelu",
)


def _lipschitz(constant: float) -> Callable[..., Array]:
    return lambda _xp, error, *_others: constant * error


def _scale_error(xp: Namespace, error: Array, _value: Array, operand: Array) -> Array:
    return error * xp.abs(operand)


def _rounding_error(xp: Namespace, error: Array, value: Array, _operand: Array) -> Array:
    return xp.rint(value + error) - xp.rint(value - error)


def _logistic(xp: Namespace, value: Array) -> Array:
    return 1.0 / (1.0 + xp.exp(-value))


def _normal_cdf(xp: Namespace, value: Array) -> Array:
    # Not 1 + erf, which is zero for values whose product with infinity is none.
    erfc_of = xp.frompyfunc(erfc, 1, 1)
    return 0.5 * erfc_of(value * -0.7071067811865476).astype(value.dtype)


def _gelu_erf_of_whole_arrays(xp: Namespace, value: Array, _operand: None) -> Array:
    """Return x times the normal distribution function of x.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: the error of erf is
    at most 1.5e-7.
    """
    coefficients = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    magnitude = xp.abs(value) * xp.float32(0.7071067811865476)
    t = 1 / (1 + xp.float32(0.3275911) * magnitude)
    polynomial = t * xp.polyval(xp.array(coefficients, xp.float32), t)
    tail = polynomial * xp.exp(-magnitude * magnitude) / 2
    return value * xp.where(value < 0, tail, 1 - tail)


def _gelu_tanh(xp: Namespace, value: Array) -> Array:
    inner = 0.7978845608028654 * (value + 0.044715 * value**3)
    return value * _logistic(xp, 2.0 * inner)  # (1 + tanh(inner)) / 2 without cancellation


def _causal(xp: Namespace, value: Array, _operand: None) -> Array:
    rows, keys = value.shape
    return xp.where(xp.tri(rows, keys, keys - rows, dtype=bool), value, -xp.inf)


def _onednn(name: str, *constants: float) -> tuple[OneDnnPostOp, ...]:
    return (OneDnnPostOp(algorithm=OneDnnAlgorithm[name], constants=constants),)


_ONEDNN_ADD, _ONEDNN_MUL = _onednn("BINARY_ADD"), _onednn("BINARY_MUL")
_ONNX_ADD, _ONNX_MUL = OnnxOperator(name="Add"), OnnxOperator(name="Mul")
_TORCH_ADD, _TORCH_MUL = TorchOperator(name="add"), TorchOperator(name="mul")

# fmt: off
STEP_KINDS: dict[str, StepKind] = {kind.name: kind for kind in (
    StepKind(name="bias",       operand=OperandShape.ROW_VECTOR, cpp="value + operand",
             reference=lambda _xp, value, operand: value + operand,
             after_product=PassOperation.ADD,
             argument=Argument.BIAS, onednn=_ONEDNN_ADD, onnx=_ONNX_ADD, torch=_TORCH_ADD),
    StepKind(name="scale",      operand=OperandShape.SCALAR,     cpp="value * operand",
             operand_type=DType.F32, is_scale=True,
             reference=lambda _xp, value, operand: value * operand, error=_scale_error,
             after_product=PassOperation.MULTIPLY,
             argument=Argument.SCALE, onednn=_ONEDNN_MUL, onnx=_ONNX_MUL, torch=_TORCH_MUL),
    StepKind(name="channel_scale", operand=OperandShape.ROW_VECTOR, cpp="value * operand",
             operand_type=DType.F32, is_scale=True,
             reference=lambda _xp, value, operand: value * operand, error=_scale_error,
             after_product=PassOperation.MULTIPLY,
             argument=Argument.CHANNEL_SCALE, onednn=_ONEDNN_MUL, onnx=_ONNX_MUL, torch=_TORCH_MUL),
    StepKind(name="row_scale",  operand=OperandShape.COLUMN_VECTOR, cpp="value * operand",
             operand_type=DType.F32, is_scale=True,
             reference=lambda _xp, value, operand: value * operand, error=_scale_error,
             after_product=PassOperation.MULTIPLY,
             onednn=_ONEDNN_MUL, onnx=_ONNX_MUL, torch=_TORCH_MUL),
    StepKind(name="x_zero_point", operand=OperandShape.SCALAR, operand_type=DType.S32,
             is_offset=True, cpp="", ulp=0.0,
             reference=lambda _xp, value, operand: value - operand,
             after_product=PassOperation.TAKE_OFFSET,
             argument=Argument.X_ZERO_POINT),
    StepKind(name="x_row_zero_point", operand=OperandShape.COLUMN_VECTOR, operand_type=DType.S32,
             is_offset=True, cpp="", ulp=0.0,
             reference=lambda _xp, value, operand: value - operand,
             after_product=PassOperation.TAKE_OFFSET),
    StepKind(name="y_zero_point", operand=OperandShape.SCALAR, operand_type=DType.S32,
             cpp="nearest_even(value) + operand", functions=(_NEAREST_EVEN,),
             ulp=0.0, error=_rounding_error,
             reference=lambda xp, value, operand: xp.rint(value) + operand,
             after_product=PassOperation.ROUND_AND_ADD,
             argument=Argument.Y_ZERO_POINT,
             onednn=_onednn("ROUND") + _ONEDNN_ADD),
    StepKind(name="add",        operand=OperandShape.MATRIX,     cpp="value + operand",
             reference=lambda _xp, value, operand: value + operand,
             after_product=PassOperation.ADD,
             onednn=_ONEDNN_ADD, onnx=_ONNX_ADD, torch=_TORCH_ADD),
    StepKind(name="mul",        operand=OperandShape.MATRIX,     cpp="value * operand",
             reference=lambda _xp, value, operand: value * operand, error=_scale_error,
             after_product=PassOperation.MULTIPLY,
             onednn=_ONEDNN_MUL, onnx=_ONNX_MUL, torch=_TORCH_MUL),
    StepKind(name="relu",       cpp="maximum(value, 0.0f)", functions=(_MAXIMUM,), constants=1,
             ulp=0.0,
             reference=lambda xp, value, _operand: xp.maximum(value, 0.0),
             after_product=PassOperation.RELU,
             onednn=_onednn("RELU"), onnx=OnnxOperator(name="Relu"),
             torch=TorchOperator(name="relu", post_op=("relu", ""), zentorch="relu")),
    StepKind(name="leaky_relu", cpp="select_negative(value, value * slope, value)",
             functions=(_SELECT_NEGATIVE,), constants=2,
             parameters=(("slope", 0.01),),
             reference=lambda xp, value, _operand, slope: xp.where(value < 0, value * slope, value),
             error=_lipschitz(1.0), check=lambda slope: abs(slope) <= 1.0,
             rule="slope must be between -1 and 1",
             after_product=PassOperation.LEAKY_RELU,
             onednn=_onednn("RELU"), onnx=OnnxOperator(name="LeakyRelu", parameters=("alpha",)),
             torch=TorchOperator(name="leaky_relu", post_op=("leaky_relu", ""))),
    StepKind(name="clamp",      cpp="minimum(maximum(value, low), high)",
             functions=(_MAXIMUM, _MINIMUM), constants=2, ulp=0.0,
             parameters=(("low", -1.0), ("high", 1.0)),
             reference=lambda xp, value, _operand, low, high:
                 xp.minimum(xp.maximum(value, low), high),
             check=lambda low, high: low <= high, rule="low must not be above high",
             after_product=PassOperation.CLAMP,
             onednn=_onednn("CLIP"), onnx=OnnxOperator(name="Clip"),
             torch=TorchOperator(name="clamp", post_op=("hardtanh", ""))),
    StepKind(name="hardswish",
             cpp="value * (minimum(maximum(value + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))",
             functions=(_MAXIMUM, _MINIMUM), constants=4,
             reference=lambda xp, value, _operand:
                 value * xp.minimum(xp.maximum(value + 3.0, 0.0), 6.0) / 6.0,
             error=_lipschitz(1.5), ulp=4.0, absolute=1e-6,
             after_product=PassOperation.HARDSWISH,
             onednn=_onednn("HARDSWISH", 1.0 / 6.0, 0.5), onnx=OnnxOperator(name="HardSwish"),
             torch=TorchOperator(name="hardswish", post_op=("hardswish", ""))),
    StepKind(name="sigmoid",    cpp="keep_nan(value, logistic(value))",
             functions=(_KEEP_NAN, _LOGISTIC), ulp=4.0, absolute=1e-37,
             reference=lambda xp, value, _operand: _logistic(xp, value),
             error=_lipschitz(0.25),
             after_product=PassOperation.SIGMOID,
             onednn=_onednn("LOGISTIC"), onnx=OnnxOperator(name="Sigmoid"),
             torch=TorchOperator(name="sigmoid", zentorch="sigmoid")),
    StepKind(name="silu",       cpp="value * logistic(value)", functions=(_LOGISTIC,),
             ulp=6.0, absolute=1e-35,
             reference=lambda xp, value, _operand: value * _logistic(xp, value),
             error=_lipschitz(1.1),
             after_product=PassOperation.SILU,
             onednn=_onednn("SWISH", 1.0),
             onnx=OnnxOperator(name="QuickGelu", attributes=(("alpha", 1.0),),
                               domain="com.microsoft"),
             torch=TorchOperator(name="silu", post_op=("swish", ""), zentorch="silu")),
    StepKind(name="tanh",       cpp="keep_nan(value, hyperbolic_tangent(value))",
             functions=(_KEEP_NAN, _HYPERBOLIC_TANGENT), ulp=6.0,
             reference=lambda xp, value, _operand: xp.tanh(value),
             after_product=PassOperation.TANH,
             onednn=_onednn("TANH"), onnx=OnnxOperator(name="Tanh"),
             torch=TorchOperator(name="tanh", post_op=("tanh", ""), zentorch="tanh")),
    StepKind(name="elu",
             cpp="select_negative(value, alpha * exponential_minus_one(value), value)",
             functions=(_SELECT_NEGATIVE, _EXPONENTIAL_MINUS_ONE), constants=1, ulp=6.0,
             parameters=(("alpha", 1.0),),
             reference=lambda xp, value, _operand, alpha:
                 xp.where(value < 0, alpha * xp.expm1(xp.minimum(value, 0.0)), value),
             error=lambda _xp, error, _value, _operand, alpha: max(1.0, abs(alpha)) * error,
             after_product=PassOperation.ELU,
             onednn=_onednn("ELU"), onnx=OnnxOperator(name="Elu", parameters=("alpha",)),
             torch=TorchOperator(name="elu")),
    StepKind(name="mish",       cpp="value * tanh_of_softplus(value)",
             functions=(_TANH_OF_SOFTPLUS,), ulp=6.0, absolute=1e-35,
             reference=lambda xp, value, _operand:
                 value * xp.tanh(xp.log1p(xp.exp(value))),
             error=_lipschitz(1.1),
             after_product=PassOperation.MISH,
             onednn=_onednn("MISH"), onnx=OnnxOperator(name="Mish"),
             torch=TorchOperator(name="mish")),
    StepKind(name="gelu_tanh",  cpp="gelu(value, tanh_rise)", functions=(_GELU, _TANH_RISE),
             ulp=8.0, absolute=1e-6,
             reference=lambda xp, value, _operand: _gelu_tanh(xp, value),
             error=_lipschitz(1.13),
             after_product=PassOperation.GELU_TANH,
             onednn=_onednn("GELU_TANH"),
             onnx=OnnxOperator(name="Gelu", attributes=(("approximate", "tanh"),)),
             torch=TorchOperator(name="gelu", attributes=(("approximate", "tanh"),),
                                 post_op=("gelu", "tanh"), zentorch="gelu_tanh")),
    StepKind(name="gelu_erf",   cpp="gelu(value, erf_rise)", functions=(_GELU, _ERF_RISE),
             ulp=8.0, absolute=1e-6,
             reference=lambda xp, value, _operand: value * _normal_cdf(xp, value),
             whole_arrays=_gelu_erf_of_whole_arrays,
             error=_lipschitz(1.13),
             after_product=PassOperation.GELU_ERF,
             onednn=_onednn("GELU_ERF"), onnx=OnnxOperator(name="Gelu"),
             torch=TorchOperator(name="gelu", post_op=("gelu", "none"),
                                 zentorch="gelu_erf")),
)}

# Of scores alone: they hide keys from queries, and take no part in other chains.
MASK_KINDS: dict[str, StepKind] = {kind.name: kind for kind in (
    # Query i sees key j where j <= i + (keys - queries): the last one sees all of a cache.
    StepKind(name="causal",     cpp="", hides=True, ulp=0.0, reference=_causal),
)}
# fmt: on
