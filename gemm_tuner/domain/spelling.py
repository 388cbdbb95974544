"""How the libraries beside the kernels spell a step of an epilogue, as plain data."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Argument(StrEnum):
    """The arguments that libraries have for a step at the head or at the end of a chain."""

    X_ZERO_POINT = "x_zero_point"
    SCALE = "scale"
    CHANNEL_SCALE = "channel_scale"
    BIAS = "bias"
    Y_ZERO_POINT = "y_zero_point"


class PassOperation(IntEnum):
    """The operations of the pass in C after a product, numbered as in libraries/native/finish.c."""

    ADD = 0
    MULTIPLY = 1
    TAKE_OFFSET = 2
    ROUND_AND_ADD = 3
    RELU = 4
    LEAKY_RELU = 5
    CLAMP = 6
    HARDSWISH = 7
    SIGMOID = 8
    SILU = 9
    TANH = 10
    ELU = 11
    MISH = 12
    GELU_TANH = 13
    GELU_ERF = 14


class OneDnnAlgorithm(IntEnum):
    """Algorithms of oneDNN's post-operations by their number in its C API, version 3."""

    RELU = 0x20
    TANH = 0x21
    ELU = 0x22
    LINEAR = 0x26
    LOGISTIC = 0x29
    GELU_TANH = 0x2B
    SWISH = 0x2C
    CLIP = 0x2E
    GELU_ERF = 0x31
    ROUND = 0x32
    MISH = 0x33
    HARDSWISH = 0x34
    BINARY_ADD = 0x1FFF0
    BINARY_MUL = 0x1FFF1

    @property
    def is_binary(self) -> bool:
        """Return whether it reads the operand of the step."""
        return self in {self.BINARY_ADD, self.BINARY_MUL}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDnnPostOp:
    """A post-operation of oneDNN: its algorithm, and what follows the parameters of the step.

    Of an element-wise algorithm, the parameters and then `constants` are alpha and beta.
    """

    algorithm: OneDnnAlgorithm
    constants: tuple[float, ...] = ()

    def alpha_beta(self, parameters: tuple[float, ...] = ()) -> tuple[float, float]:
        """Return alpha and beta of a step with these parameters."""
        alpha, beta = (*parameters, *self.constants, 0.0, 0.0)[:2]
        return alpha, beta


Attribute = float | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOperator:
    """An operator of ONNX: its parameters are attributes, or inputs if these have no names."""

    name: str
    attributes: tuple[tuple[str, Attribute], ...] = ()
    parameters: tuple[str, ...] = ()
    domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOperator:
    """An operator of ATen: `name` makes a new tensor, `name` and an underscore write in place.

    Its arguments are the value, the operand if there is one, the parameters, and `attributes` by
    name. `post_op` is what the linear layers of the oneDNN in PyTorch call it, with its algorithm,
    if they fuse it; the parameters are its scalars. `zentorch` is what the linear layer of that
    package calls it, if it fuses it.
    """

    name: str
    attributes: tuple[tuple[str, Attribute], ...] = ()
    post_op: tuple[str, str] | None = None
    zentorch: str | None = None
