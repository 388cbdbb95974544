"""Element types, and the four that one problem combines."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.errors import InvalidProblem


class DType(StrEnum):
    """An element type of an operand or of the accumulator."""

    F32 = "f32"
    BF16 = "bf16"

    @property
    def size_bytes(self) -> int:
        """Return the size of one element, in bytes."""
        return {DType.F32: 4, DType.BF16: 2}[self]

    @property
    def cpp(self) -> str:
        """Return the C++ type of one element."""
        return {DType.F32: "float", DType.BF16: "Bf16"}[self]

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of rounding to this type."""
        return {DType.F32: 2.0**-24, DType.BF16: 2.0**-8}[self]

    @classmethod
    def parse(cls, text: str) -> "DType":
        """Return the element type named `text`.

        Raises:
            InvalidProblem: `text` names no known type.
        """
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(member.value for member in cls)
            raise InvalidProblem(f"dtype {text!r} is not known; use one of: {known}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandTypes:
    """The element types of x, w, the accumulator and y.

    The text form is `x_w_accumulator_y`; one name alone stands for x, w and y, accumulated in f32.
    """

    x: DType
    w: DType
    accumulator: DType
    y: DType

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        if self == OperandTypes.of(self.x):
            return self.x.value
        return f"{self.x.value}_{self.w.value}_{self.accumulator.value}_{self.y.value}"

    @classmethod
    def of(cls, dtype: DType, *, y: DType | None = None) -> "OperandTypes":
        """Return the types of a product in `dtype`, accumulated in f32; y is `dtype` by default."""
        return cls(x=dtype, w=dtype, accumulator=DType.F32, y=y or dtype)

    @classmethod
    def parse(cls, text: str) -> "OperandTypes":
        """Return the types named `text`, such as `f32`.

        Raises:
            InvalidProblem: `text` is not one or four known types.
        """
        names = text.split("_")
        if len(names) == 1:
            return cls.of(DType.parse(text))
        if len(names) != 4:
            raise InvalidProblem(
                f"operand types {text!r} are not understood; "
                "give one dtype, or four as x_w_accumulator_y."
            )
        x, w, accumulator, y = (DType.parse(name) for name in names)
        return cls(x=x, w=w, accumulator=accumulator, y=y)


F32 = OperandTypes.of(DType.F32)
