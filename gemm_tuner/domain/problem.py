"""The problem: `y = epilogue(x @ w)`, as a caller asks for it, with no machine in it."""

import re
from dataclasses import dataclass, field
from enum import StrEnum

from gemm_tuner.domain.dtype import F32, DType, OperandTypes
from gemm_tuner.domain.epilogue import NO_EPILOGUE, Epilogue, EpilogueOperand
from gemm_tuner.errors import InvalidEpilogue, InvalidProblem

MAX_DIMENSION = 2**31 - 1
MAX_OPERAND_BYTES = 2**40

_SIZES = re.compile(r"(?P<m>-?\d+(?:\.\.\d+)?)x(?P<n>-?\d+)x(?P<k>-?\d+)")


class WeightLayout(StrEnum):
    """How the caller stores the weights before packing."""

    NK = "nk"  # (n, k), row-major, as PyTorch's Linear does
    KN = "kn"  # (k, n), row-major


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The number of rows of x: exact, or any from `low` to `high` chosen at each call."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Check the range."""
        for value in (self.low, self.high):
            _check_dimension("m", value)
        if self.low > self.high:
            raise InvalidProblem(f"m = {self.text} is an empty range; write low..high.")

    @property
    def exact(self) -> int | None:
        """Return the number of rows if it is known at build time."""
        return self.low if self.low == self.high else None

    @property
    def text(self) -> str:
        """Return `128`, or `1..64` for a range."""
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"

    def __contains__(self, rows: int) -> bool:
        return self.low <= rows <= self.high

    @classmethod
    def parse(cls, text: str) -> "Rows":
        """Return the rows written as `128` or `1..64`.

        Raises:
            InvalidProblem: `text` is neither.
        """
        low, _dots, high = text.partition("..")
        try:
            return cls(low=int(low), high=int(high or low))
        except ValueError as error:
            if isinstance(error, InvalidProblem):
                raise
            raise InvalidProblem(
                f"m = {text!r} is not understood; write a number, or low..high."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A linear layer: y (m, n) = epilogue(x (m, k) @ w), lengths in elements.

    n and k are known at build time; m is exact or a range. The text form is
    `f32 128x3072x768 nk bias+gelu_erf`; the last two words may be left out when parsing.
    """

    m: Rows
    n: int
    k: int
    types: OperandTypes = field(default=F32)
    w_layout: WeightLayout = WeightLayout.NK
    epilogue: Epilogue = field(default=NO_EPILOGUE)

    def __post_init__(self) -> None:
        """Check the sizes."""
        _check_dimension("n", self.n)
        _check_dimension("k", self.k)
        for name, elements, dtype in (
            ("x", self.m.high * self.k, self.types.x),
            ("w", self.n * self.k, self.types.w),
            ("y", self.m.high * self.n, self.types.y),
        ):
            if elements * dtype.size_bytes > MAX_OPERAND_BYTES:
                raise InvalidProblem(
                    f"{name} of {self.sizes_text} takes {elements * dtype.size_bytes} bytes; "
                    f"at most {MAX_OPERAND_BYTES} are supported: split the problem."
                )

        self._check_steps()

    @property
    def sizes_text(self) -> str:
        """Return the sizes as `m x n x k` without spaces."""
        return f"{self.m.text}x{self.n}x{self.k}"

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        return f"{self.types.text} {self.sizes_text} {self.w_layout.value} {self.epilogue.text}"

    def flop(self, rows: int) -> int:
        """Return the floating-point operations of the product for `rows` rows."""
        return 2 * rows * self.n * self.k

    def operand_type(self, operand: EpilogueOperand) -> DType:
        """Return the element type of an operand of the epilogue."""
        return operand.dtype or (DType.F32 if self.types.y.is_integer else self.types.y)

    def _check_steps(self) -> None:
        kinds = [step.kind for step in self.epilogue.steps]
        offsets = [kind.is_offset for kind in kinds]
        if any(offsets) and self.types.accumulator is not DType.S32:
            raise InvalidEpilogue(
                f"epilogue {self.epilogue.text!r} takes an offset off integers, but "
                f"{self.types.text} is accumulated in {self.types.accumulator.value}: leave it out."
            )
        if offsets != sorted(offsets, reverse=True):
            raise InvalidEpilogue(
                f"epilogue {self.epilogue.text!r} takes an offset off x after other steps; "
                "put the zero points of x first."
            )
        if self.types.y is DType.S32 and not all(offsets):
            raise InvalidEpilogue(
                f"epilogue {self.epilogue.text!r} computes in floating point, but y is s32; "
                "use another type of y, or only zero points of x."
            )

    @property
    def w_bytes(self) -> int:
        """Return the size of w as the caller stores it."""
        return self.n * self.k * self.types.w.size_bytes

    @classmethod
    def create(
        cls,
        m: int | str,
        n: int,
        k: int,
        *,
        dtype: str = DType.F32.value,
        w_layout: str = WeightLayout.NK.value,
        epilogue: str = "none",
    ) -> "Problem":
        """Return the problem described by plain values, as they come from a user.

        Raises:
            InvalidProblem: a size, dtype or layout cannot be used.
            InvalidEpilogue: the epilogue cannot be used.
        """
        try:
            layout = WeightLayout(w_layout)
        except ValueError:
            raise InvalidProblem(
                f"weight layout {w_layout!r} is not known; "
                "use 'nk' for (n, k) as PyTorch's Linear, or 'kn' for (k, n)."
            ) from None
        return cls(
            m=Rows.parse(str(m)),
            n=n,
            k=k,
            types=OperandTypes.parse(dtype),
            w_layout=layout,
            epilogue=Epilogue.parse(epilogue),
        )

    @classmethod
    def parse(cls, text: str) -> "Problem":
        """Return the problem written as `f32 128x3072x768 nk bias+gelu_erf`.

        Raises:
            InvalidProblem: the text does not have this form, or a size cannot be used.
            InvalidEpilogue: the epilogue cannot be used.
        """
        words = text.split()
        sizes = _SIZES.fullmatch(words[1]) if 2 <= len(words) <= 4 else None
        if sizes is None:
            raise InvalidProblem(
                f"problem {text!r} is not understood; "
                "write it as 'f32 128x3072x768 nk bias+gelu_erf'."
            )
        return cls.create(
            sizes["m"],
            int(sizes["n"]),
            int(sizes["k"]),
            dtype=words[0],
            w_layout=words[2] if len(words) > 2 else WeightLayout.NK.value,
            epilogue=words[3] if len(words) > 3 else "none",
        )


def _check_dimension(name: str, value: int) -> None:
    if not 0 <= value <= MAX_DIMENSION:
        raise InvalidProblem(
            f"{name} = {value} is out of range; it must be from 0 to {MAX_DIMENSION}."
        )
