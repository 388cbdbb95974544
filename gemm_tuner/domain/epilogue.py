"""Epilogues: what happens to an accumulator before it is stored as y.

An epilogue is a chain of steps, each of a kind that is a row of `domain/step_table.py`.
"""

from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.step_kind import OperandShape, StepKind
from gemm_tuner.domain.step_table import MASK_KINDS, STEP_KINDS
from gemm_tuner.errors import InvalidEpilogue

__all__ = [
    "NO_EPILOGUE",
    "STEP_KINDS",
    "Epilogue",
    "EpilogueOperand",
    "OperandShape",
    "Step",
    "StepKind",
]

MAX_STEPS = 16


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
        kind = STEP_KINDS.get(name) or MASK_KINDS.get(name)
        if kind is None:
            known = sorted(STEP_KINDS)
            near = [one for one in known if name and one.startswith(name)]
            but = f", but {' or '.join(near)} is" if near else ""
            raise InvalidEpilogue(
                f"epilogue step {name!r} is not known{but}; use 'none' or a chain such as "
                f"'bias+relu' of: {', '.join(known)}."
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
    """An array that an epilogue reads: its name, and the kind of step that reads it."""

    name: str
    kind: StepKind

    @property
    def shape(self) -> OperandShape:
        """Return its shape."""
        return self.kind.operand

    @property
    def dtype(self) -> DType | None:
        """Return its type, as in `StepKind`."""
        return self.kind.operand_type


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def text(self) -> str:
        """Return the text form, which `parse` reads back; `none` for an empty chain."""
        return "+".join(step.text for step in self.steps) or "none"

    @property
    def operands(self) -> tuple[EpilogueOperand, ...]:
        """Return the operands of the chain, in order.

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
            operands.append(EpilogueOperand(name=name + suffix, kind=step.kind))
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
