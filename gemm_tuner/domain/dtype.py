"""Element types, and the four that one problem combines."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from gemm_tuner.errors import InvalidProblem


class DType(StrEnum):
    """An element type of an operand or of the accumulator."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    S32 = "s32"
    S8 = "s8"
    U8 = "u8"
    S4 = "s4"
    U4 = "u4"

    @property
    def size_bits(self) -> int:
        """Return the size of one element, in bits."""
        return _FACTS[self].size_bits

    @property
    def size_bytes(self) -> int:
        """Return the size of one element that shares its bytes with no other."""
        return self.row_bytes(1)

    def row_bytes(self, elements: int) -> int:
        """Return the size of so many elements side by side, in bytes."""
        return -(-elements * self.size_bits // 8)

    @property
    def cpp(self) -> str:
        """Return the C++ type of one element, or of the byte that several share."""
        return _FACTS[self].cpp

    @property
    def is_integer(self) -> bool:
        """Say whether the elements are integers."""
        return _FACTS[self].unit_roundoff == 0.0

    @property
    def is_signed(self) -> bool:
        """Say whether there are elements below zero."""
        return self not in {DType.U8, DType.U4}

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of rounding to this type, 0 for integers."""
        return _FACTS[self].unit_roundoff

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


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts of an element type."""

    size_bits: int
    cpp: str
    unit_roundoff: float = 0.0


_FACTS = {
    DType.F32: _Facts(32, "float", 2.0**-24),
    DType.BF16: _Facts(16, "Bf16", 2.0**-8),
    DType.F16: _Facts(16, "F16", 2.0**-11),
    DType.S32: _Facts(32, "int32_t"),
    DType.S8: _Facts(8, "int8_t"),
    DType.U8: _Facts(8, "uint8_t"),
    DType.S4: _Facts(4, "uint8_t"),
    DType.U4: _Facts(4, "uint8_t"),
}

# As the accumulator, f16 allows a kernel to add this many products in f16, and these sums in f32.
TERMS_IN_F16 = 64

# What w alone may be of integers, and the types of x and y beside it.
_QUANTISED_WEIGHTS = (DType.S8, DType.U8, DType.S4, DType.U4)
_BESIDE_QUANTISED = (DType.F32, DType.BF16)

_BYTES = {DType.U8, DType.S8}

_SHORT_NAMES = {
    "int8": "u8_s8_s32_f32",
    **{f"{x}{w}": f"{x}_{w}_s32_f32" for x in ("u8", "s8") for w in ("s8", "u8")},
    **{f"{x}_{w}": f"{x}_{w}_f32_{x}" for x in _BESIDE_QUANTISED for w in _QUANTISED_WEIGHTS},
}
# What frameworks call them.
_ELSEWHERE = {
    **dict.fromkeys(("float32", "fp32", "float", "single"), "f32"),
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    "i8": "int8",
}


@dataclass(frozen=True, kw_only=True)
class OperandTypes:
    """The element types of x, w, the accumulator and y.

    The text form is `x_w_accumulator_y`; the name of one floating-point type alone stands for x, w
    and y, accumulated in f32. Bytes are accumulated in s32. The accumulator f16 is a permission: up
    to `TERMS_IN_F16` products may be added in f16, and sums of them in f32. Where w alone is of
    integers, they stand for floating-point numbers: `bf16_s4` is short for `bf16_s4_f32_bf16`.
    """

    x: DType
    w: DType
    accumulator: DType
    y: DType

    def __post_init__(self) -> None:
        """Check that the types go together."""
        is_float = not (self.x.is_integer or self.w.is_integer or self.y.is_integer)
        is_bytes = {self.x, self.w} <= _BYTES and self.y.size_bits >= 8
        is_quantised = self.w in _QUANTISED_WEIGHTS and {self.x, self.y} <= {*_BESIDE_QUANTISED}
        allowed = {DType.S32} if is_bytes else {DType.F32}
        if self.x is self.w is DType.F16:
            allowed.add(DType.F16)
        if not (is_float or is_bytes or is_quantised) or self.accumulator not in allowed:
            raise InvalidProblem(
                f"operand types {self._full_text} do not go together; use floating-point types "
                "with the accumulator f32, f16_f16_f16_f16, bytes such as u8_s8_s32_f32, or "
                "integers for w alone such as bf16_s4."
            )

    @property
    def is_weight_only(self) -> bool:
        """Say whether w alone is of integers, which stand for floating-point numbers."""
        return self.w.is_integer and not self.x.is_integer

    @property
    def _full_text(self) -> str:
        return f"{self.x.value}_{self.w.value}_{self.accumulator.value}_{self.y.value}"

    @cached_property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        is_plain = self.x is self.w is self.y and self.accumulator is DType.F32
        return self.x.value if is_plain else self._full_text

    @property
    def y_holds_sums(self) -> bool:
        """Say whether an element of y has the 32 bits of an unfinished sum."""
        return self.y.size_bytes == DType.F32.size_bytes

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
        names = _SHORT_NAMES.get(text, text).split("_")
        if len(names) == 1:
            if text not in list(DType):
                name = _ELSEWHERE.get(text.lower())
                meant = f", but {name} is" if name else ""
                raise InvalidProblem(f"dtype {text!r} is not known{meant}; {_choices()}")
            dtype = DType(text)
            if dtype.is_integer:
                raise InvalidProblem(
                    f"dtype {text!r} does not say the types of all operands; {_choices()}"
                )
            return cls.of(dtype)
        if len(names) != 4:
            raise InvalidProblem(f"operand types {text!r} are not understood; {_choices()}")
        x, w, accumulator, y = (DType.parse(name) for name in names)
        return cls(x=x, w=w, accumulator=accumulator, y=y)


def _choices() -> str:
    floats = (dtype.value for dtype in DType if not dtype.is_integer)
    return (
        f"use one of: {', '.join((*floats, *_SHORT_NAMES))}; or four as x_w_accumulator_y, each "
        f"one of: {', '.join(dtype.value for dtype in DType)}."
    )


F32 = OperandTypes.of(DType.F32)
