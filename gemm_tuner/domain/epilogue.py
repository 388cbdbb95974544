"""Epilogues: what happens to an accumulator before it is stored as y.

An epilogue is a chain of steps. Each step is one row of `STEP_KINDS`: its operand, its C++ on one
vector, its NumPy reference and how it passes on an error. Adding a step is adding a row.
"""

from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass
from enum import StrEnum
from math import erf, isfinite
from typing import Any

from gemm_tuner.domain.dtype import DType
from gemm_tuner.errors import InvalidEpilogue

MAX_STEPS = 16

# References take the array namespace (numpy) as their first argument, so that this layer needs
# the standard library only.
Array = Any
Namespace = Any


class OperandShape(StrEnum):
    """The shape of what a step reads besides the value."""

    NONE = "none"
    SCALAR = "scalar"
    ROW_VECTOR = "row_vector"  # (n,)
    COLUMN_VECTOR = "column_vector"  # (m,)
    MATRIX = "matrix"  # (m, n), any leading dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """One row of the table of epilogue steps.

    `operand_type` is the type of the operand, None for that of y, or f32 where y is of integers.
    A step that `is_offset` takes an offset of x off the sums of integers, before they become
    floats: its operand is that offset, and its reference gets the offset times the sums of w.
    `cpp` is a C++ expression over the vectors `value` and `operand` and the scalars named in
    `parameters`. `reference(xp, value, operand, *parameters)` is the same in float64.
    `error(xp, error, value, operand)` bounds the error of the step's exact result when `value`
    has the absolute error `error`. `ulp` bounds the step's own error, in units in the last place
    of float32 of its result; `absolute` is its own absolute error, for results near zero.
    """

    name: str
    cpp: str
    reference: Callable[..., Array]
    operand: OperandShape = OperandShape.NONE
    operand_type: DType | None = None
    is_offset: bool = False
    parameters: tuple[tuple[str, float], ...] = ()
    error: Callable[[Namespace, Array, Array, Array], Array] = lambda _xp, error, _value, _o: error
    ulp: float = 1.0
    absolute: float = 0.0
    check: Callable[..., bool] = lambda *_parameters: True
    rule: str = ""


def _lipschitz(constant: float) -> Callable[[Namespace, Array, Array, Array], Array]:
    return lambda _xp, error, _value, _operand: constant * error


def _scale_error(xp: Namespace, error: Array, _value: Array, operand: Array) -> Array:
    return error * xp.abs(operand)


def _rounding_error(xp: Namespace, error: Array, value: Array, _operand: Array) -> Array:
    return xp.rint(value + error) - xp.rint(value - error)


def _logistic(xp: Namespace, value: Array) -> Array:
    return 1.0 / (1.0 + xp.exp(-value))


def _normal_cdf(xp: Namespace, value: Array) -> Array:
    erf_of = xp.frompyfunc(erf, 1, 1)
    return 0.5 * (1.0 + erf_of(value * 0.7071067811865476).astype(value.dtype))


def _gelu_tanh(xp: Namespace, value: Array) -> Array:
    inner = 0.7978845608028654 * (value + 0.044715 * value**3)
    return 0.5 * value * (1.0 + xp.tanh(inner))


# fmt: off
STEP_KINDS: dict[str, StepKind] = {kind.name: kind for kind in (
    StepKind(name="bias",       operand=OperandShape.ROW_VECTOR, cpp="value + operand",
             reference=lambda _xp, value, operand: value + operand),
    StepKind(name="scale",      operand=OperandShape.SCALAR,     cpp="value * operand",
             operand_type=DType.F32, reference=lambda _xp, value, operand: value * operand,
             error=_scale_error),
    StepKind(name="channel_scale", operand=OperandShape.ROW_VECTOR, cpp="value * operand",
             operand_type=DType.F32, reference=lambda _xp, value, operand: value * operand,
             error=_scale_error),
    StepKind(name="row_scale",  operand=OperandShape.COLUMN_VECTOR, cpp="value * operand",
             operand_type=DType.F32, reference=lambda _xp, value, operand: value * operand,
             error=_scale_error),
    StepKind(name="x_zero_point", operand=OperandShape.SCALAR, operand_type=DType.S32,
             is_offset=True, cpp="", ulp=0.0,
             reference=lambda _xp, value, operand: value - operand),
    StepKind(name="x_row_zero_point", operand=OperandShape.COLUMN_VECTOR, operand_type=DType.S32,
             is_offset=True, cpp="", ulp=0.0,
             reference=lambda _xp, value, operand: value - operand),
    StepKind(name="y_zero_point", operand=OperandShape.SCALAR, operand_type=DType.S32,
             cpp="nearest_even(value) + operand", ulp=0.0, error=_rounding_error,
             reference=lambda xp, value, operand: xp.rint(value) + operand),
    StepKind(name="add",        operand=OperandShape.MATRIX,     cpp="value + operand",
             reference=lambda _xp, value, operand: value + operand),
    StepKind(name="mul",        operand=OperandShape.MATRIX,     cpp="value * operand",
             reference=lambda _xp, value, operand: value * operand, error=_scale_error),
    StepKind(name="relu",       cpp="maximum(value, 0.0f)", ulp=0.0,
             reference=lambda xp, value, _operand: xp.maximum(value, 0.0)),
    StepKind(name="leaky_relu", cpp="select_negative(value, value * slope, value)",
             parameters=(("slope", 0.01),),
             reference=lambda xp, value, _operand, slope: xp.where(value < 0, value * slope, value),
             error=_lipschitz(1.0), check=lambda slope: abs(slope) <= 1.0,
             rule="slope must be between -1 and 1"),
    StepKind(name="clamp",      cpp="minimum(maximum(value, low), high)", ulp=0.0,
             parameters=(("low", -1.0), ("high", 1.0)),
             reference=lambda xp, value, _operand, low, high:
                 xp.minimum(xp.maximum(value, low), high),
             check=lambda low, high: low <= high, rule="low must not be above high"),
    StepKind(name="hardswish",
             cpp="value * (minimum(maximum(value + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f))",
             reference=lambda xp, value, _operand:
                 value * xp.minimum(xp.maximum(value + 3.0, 0.0), 6.0) / 6.0,
             error=_lipschitz(1.5), ulp=4.0, absolute=1e-6),
    StepKind(name="sigmoid",    cpp="keep_nan(value, logistic(value))", ulp=4.0, absolute=1e-37,
             reference=lambda xp, value, _operand: _logistic(xp, value),
             error=_lipschitz(0.25)),
    StepKind(name="silu",       cpp="value * logistic(value)", ulp=6.0, absolute=1e-35,
             reference=lambda xp, value, _operand: value * _logistic(xp, value),
             error=_lipschitz(1.1)),
    StepKind(name="tanh",       cpp="keep_nan(value, hyperbolic_tangent(value))", ulp=6.0,
             reference=lambda xp, value, _operand: xp.tanh(value)),
    StepKind(name="gelu_tanh",  cpp="gelu(value, tanh_rise)", ulp=8.0, absolute=1e-6,
             reference=lambda xp, value, _operand: _gelu_tanh(xp, value),
             error=_lipschitz(1.13)),
    StepKind(name="gelu_erf",   cpp="gelu(value, erf_rise)", ulp=8.0, absolute=1e-6,
             reference=lambda xp, value, _operand: value * _normal_cdf(xp, value),
             error=_lipschitz(1.13)),
)}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of an epilogue: its kind and the values of its parameters, rounded to float32."""

    kind: StepKind
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Round the parameters, and check them against the row."""
        kind = self.kind
        if len(self.parameters) != len(kind.parameters):
            names = ", ".join(name for name, _default in kind.parameters) or "none"
            raise InvalidEpilogue(
                f"epilogue step {kind.name!r} got {len(self.parameters)} parameters; "
                f"it takes: {names}."
            )
        rounded = tuple(c_float(value).value for value in self.parameters)
        if not all(isfinite(value) for value in rounded):
            raise InvalidEpilogue(
                f"epilogue step {self.text!r} cannot be used: "
                "its parameters must be finite numbers in float32."
            )
        object.__setattr__(self, "parameters", rounded)
        if not kind.check(*self.parameters):
            raise InvalidEpilogue(f"epilogue step {self.text!r} cannot be used: {kind.rule}.")

    @property
    def text(self) -> str:
        """Return the text form: the name, and `:value` for each parameter unlike its default."""
        defaults = tuple(c_float(default).value for _name, default in self.kind.parameters)
        if self.parameters == defaults:
            return self.kind.name
        # A plus sign would end the step.
        numbers = (f"{value:.9g}".replace("e+", "e") for value in self.parameters)
        return ":".join((self.kind.name, *numbers))

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Return the step written as `name` or `name:value:value`.

        Raises:
            InvalidEpilogue: the name is unknown, or a parameter is not a number or not allowed.
        """
        name, *values = text.strip().split(":")
        kind = STEP_KINDS.get(name)
        if kind is None:
            known = ", ".join(sorted(STEP_KINDS))
            raise InvalidEpilogue(
                f"epilogue step {name!r} is not known; use 'none' or a chain such as "
                f"'bias+relu' of: {known}."
            )
        if not values:
            return cls(kind=kind, parameters=tuple(default for _name, default in kind.parameters))
        try:
            return cls(kind=kind, parameters=tuple(float(value) for value in values))
        except ValueError as error:
            if isinstance(error, InvalidEpilogue):
                raise
            raise InvalidEpilogue(
                f"epilogue step {text!r} has a parameter that is not a number."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueOperand:
    """An array that an epilogue reads: its name, and its shape and type as in `StepKind`."""

    name: str
    shape: OperandShape
    dtype: DType | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """An ordered chain of steps applied to each accumulator. The text form is `bias+relu`."""

    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        """Check the length of the chain."""
        if len(self.steps) > MAX_STEPS:
            raise InvalidEpilogue(
                f"an epilogue of {len(self.steps)} steps is too long; "
                f"at most {MAX_STEPS} can be fused."
            )

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back; `none` for an empty chain."""
        return "+".join(step.text for step in self.steps) or "none"

    @property
    def operands(self) -> tuple[EpilogueOperand, ...]:
        """Return what the chain reads, in order.

        The first operand of a kind is named after it (`add`), the next `add_2`, and so on.
        """
        seen: dict[str, int] = {}
        operands = []
        for step in self.steps:
            if step.kind.operand is OperandShape.NONE:
                continue
            name = step.kind.name
            seen[name] = seen.get(name, 0) + 1
            suffix = "" if seen[name] == 1 else f"_{seen[name]}"
            operands.append(
                EpilogueOperand(
                    name=name + suffix, shape=step.kind.operand, dtype=step.kind.operand_type
                )
            )
        return tuple(operands)

    @classmethod
    def parse(cls, text: str) -> "Epilogue":
        """Return the chain written as steps joined by `+`; `none` or nothing is the empty chain.

        Raises:
            InvalidEpilogue: a step is unknown or unusable, or the chain is too long.
        """
        if text.strip() in {"", "none"}:
            return cls()
        return cls(steps=tuple(Step.parse(part) for part in text.split("+")))


NO_EPILOGUE = Epilogue()
