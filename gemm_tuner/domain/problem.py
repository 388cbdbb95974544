"""The problem: `y = epilogue(x @ w)`, or attention, as a caller asks for it.

It has no machine in it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.dtype import F32, DType, OperandTypes
from gemm_tuner.domain.epilogue import NO_EPILOGUE, Epilogue, EpilogueOperand
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.rows import NUMBER, Rows, check_dimension, parse_columns
from gemm_tuner.domain.weight_layout import GROUP_SIZES, WHOLE_COLUMN, WeightLayout, parse_layout
from gemm_tuner.errors import InvalidEpilogue, InvalidProblem, InvalidSetting

MAX_OPERAND_BYTES = 2**40

_KNOWN_GROUPS = f"{', '.join(map(str, GROUP_SIZES))} or {WHOLE_COLUMN}, a whole column"
_RANGE = rf"{NUMBER}(?:\.\.{NUMBER})?"
_SIZES = re.compile(rf"(?P<m>{_RANGE})x(?P<n>{_RANGE})x(?P<k>{NUMBER})")

_EXAMPLE = "'f32 128x3072x768 nk bias+gelu_erf'"
_EXAMPLE_OF_ATTENTION = "'attention f32 128x512x64 scale+causal', whose keys are always (n, k)"

MAX_HEAD_SIZE = 256
_TYPES_OF_ATTENTION = (DType.F32, DType.BF16, DType.F16)
_OF_SCORES = ("scale", "add", "causal")


class Reduction(StrEnum):
    """In which order the k products of an element of y are added."""

    ANY = "any"  # whatever is fastest
    FIXED = "fixed"  # one order, so that each element has the same bits whatever computes it


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A product: y (m, n) = epilogue(x (m, k) @ w), lengths in elements.

    n and k are known at build time; m is exact or a range. The text form is
    `f32 128x3072x768 nk bias+gelu_erf`; the last two words may be left out when parsing. It is that
    of a linear layer, whose w is constant; a first word names another `operation`:
    `matmul f32 128x128x64 nk scale`, whose w is another array in each call.

    Where w alone is of integers, `w_group` elements along k share a scale, and a zero point if the
    integers are unsigned: `bf16_s4 1x4096x4096 nk:g128`, or `nk:gk` for one group per column. The
    last group may be shorter.

    With the `reduction` fixed, a last word of the text says so: `f32 8x32x16 nk bias fixed`. Then
    `acc = fma(x[i, l], w[l, j], acc)` in f32, from +0, for l from 0 to k - 1, is what each element
    is before the epilogue, and each operation of the epilogue is rounded by itself, whatever kernel
    computes it. Of weights in groups, that is the sum of a group; these, times their scales, are
    added from +0, the first group first. Sums of bytes are exact in any order.

    `attention f32 128x512x64 scale+causal` is y (m, k) = softmax(epilogue(x @ w.T)) @ v of m
    queries x and n keys w, each of k elements, and values v (n, k). The softmax is that of rows;
    one all of whose scores are minus infinity gives zeros. In `attention f32 1x1..4096x64 scale`,
    the call says how many keys there are: at least `least_n`, and n at most.
    """

    m: Rows
    n: int
    k: int
    types: OperandTypes = field(default=F32)
    w_layout: WeightLayout = WeightLayout.NK
    w_group: int | None = None
    epilogue: Epilogue = field(default=NO_EPILOGUE)
    reduction: Reduction = Reduction.ANY
    operation: Operation = Operation.LINEAR
    least_n: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_dimension("n", self.n)
        check_dimension("k", self.k)
        if self.least_n is not None:
            check_dimension("n", self.least_n)
            if self.least_n >= self.n:
                raise InvalidProblem(f"n = {self._n_text} is an empty range; write low..high.")
        scores = self.m.high * self.n if self.operation.has_values else 0
        for name, elements, dtype in (
            ("x", self.m.high * self.k, self.types.x),
            ("w", self.n * self.k, self.types.w),
            ("y", self.m.high * self.y_columns, self.types.y),
            ("the product of queries and keys", scores, DType.F32),
        ):
            if dtype.row_bytes(elements) > MAX_OPERAND_BYTES:
                raise InvalidProblem(
                    f"{name} of {self.sizes_text} takes {dtype.row_bytes(elements)} bytes; "
                    f"at most {MAX_OPERAND_BYTES} are supported: split the problem."
                )
        self._check_group()
        self._check_steps()
        self._check_reduction()
        self._check_attention()

    @property
    def sizes_text(self) -> str:
        """Return the sizes as `m x n x k` without spaces."""
        return f"{self.m.text}x{self._n_text}x{self.k}"

    @property
    def _n_text(self) -> str:
        return str(self.n) if self.least_n is None else f"{self.least_n}..{self.n}"

    @property
    def columns(self) -> Rows:
        """Return the columns of `epilogue(x @ w)`: exact, or from the least to the most keys."""
        return Rows(low=self.n if self.least_n is None else self.least_n, high=self.n)

    def with_columns(self, columns: int) -> "Problem":
        """Return the problem for exactly so many columns of `epilogue(x @ w)`."""
        is_exact = columns == self.n and self.least_n is None
        return self if is_exact else replace(self, n=columns, least_n=None)

    @property
    def y_columns(self) -> int:
        """Return the columns of y: those of the product, or of the values."""
        return self.k if self.operation.has_values else self.n

    @cached_property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        return self._text_with(self.sizes_text)

    @property
    def layer_text(self) -> str:
        """Return the text form with `*` for the rows: all but m."""
        return self._text_with(f"*x{self._n_text}x{self.k}")

    def _text_with(self, sizes: str) -> str:
        words = (*self.operation.words, self.types.text, sizes)
        layout = () if self.operation.has_values else (self.layout_text,)
        last = (self.reduction.value,) if self.is_fixed else ()
        return " ".join((*words, *layout, self.epilogue.text, *last))

    @property
    def is_fixed(self) -> bool:
        """Say whether each element of y has the same bits whatever kernel computes it."""
        return self.reduction is Reduction.FIXED

    @property
    def layout_text(self) -> str:
        """Return how w is stored: `nk`, or `nk:g128` with groups."""
        if self.w_group is None:
            return self.w_layout.value
        is_whole = self.w_group == max(1, self.k)
        return f"{self.w_layout.value}:g{WHOLE_COLUMN if is_whole else self.w_group}"

    @property
    def w_groups(self) -> int:
        """Return the number of groups of each column of w, 0 if w has none."""
        return 0 if self.w_group is None else -(-self.k // self.w_group)

    @property
    def has_zero_points(self) -> bool:
        """Say whether groups of w have zero points."""
        return self.w_group is not None and not self.types.w.is_signed

    @property
    def w_shape(self) -> tuple[int, int]:
        """Return the rows and columns of w as the caller stores it."""
        return (self.n, self.k) if self.w_layout is WeightLayout.NK else (self.k, self.n)

    @property
    def scores(self) -> "Problem":
        """Return the product of queries and keys before keys are hidden, in float32."""
        steps = tuple(step for step in self.epilogue.steps if not step.kind.hides)
        return replace(
            self,
            types=self.product_types,
            epilogue=Epilogue(steps=steps),
            operation=Operation.MATMUL,
            least_n=None,
        )

    @property
    def product_types(self) -> OperandTypes:
        """Return the types that micro-kernels multiply: of attention, both products in float32."""
        is_product = not self.operation.has_values
        return self.types if is_product else OperandTypes.of(self.types.x, y=DType.F32)

    def flop(self, rows: int) -> int:
        """Return the floating-point operations of the products for `rows` rows.

        Of attention that is the product with the keys and that with the values, without those that
        are hidden by their place.
        """
        products = 2 if self.operation.has_values else 1
        return 2 * products * self.seen(rows) * self.k

    def seen(self, rows: int) -> int:
        """Return how many elements `x @ w` has for `rows` rows, without those that are hidden."""
        hidden = 0
        if any(step.kind.hides for step in self.epilogue.steps):
            last = min(rows, self.n)  # rows that do not see all keys, but some
            hidden = last * (last - 1) // 2 + (rows - last) * self.n
        return rows * self.n - hidden

    def check_work(self, *regimes: Regime) -> None:
        """Check that a kernel can be the fastest, in each of some regimes.

        Raises:
            InvalidProblem: n, k or every m is 0: there is nothing to multiply.
            InvalidSetting: cold weights are asked for, and w is an activation.
        """
        self.check_regimes(*regimes)
        if 0 in {self.m.high, self.n, self.k}:
            raise InvalidProblem(
                f"problem {self.text!r} multiplies nothing; use sizes of at least 1, "
                "and for m also a range from 0, such as 0..64."
            )

    def check_regimes(self, *regimes: Regime) -> None:
        """Check that the operands of a call can be in some regimes.

        Raises:
            InvalidSetting: they have cold weights, and w is an activation.
        """
        if Regime.COLD_WEIGHTS in regimes and not self.operation.packs_ahead:
            raise InvalidSetting(
                f"problem {self.text!r} has no weights that could be cold: both operands are "
                "activations, which are warm; use the regime 'hot'."
            )

    def operand_type(self, operand: EpilogueOperand) -> DType:
        """Return the element type of an operand of the epilogue."""
        return operand.dtype or (DType.F32 if self.types.y.is_integer else self.types.y)

    def _check_group(self) -> None:
        if self.types.is_weight_only and not self.operation.packs_ahead:
            raise InvalidProblem(
                f"types {self.types.text} have quantised weights, but w of the operation "
                f"{self.operation.value!r} is known in the call alone; use f32, bf16, f16 or bytes "
                "such as int8."
            )
        if self.types.is_weight_only is (self.w_group is None):
            raise InvalidProblem(
                f"types {self.types.text} with the weight layout {self.layout_text!r} do not go "
                f"together; weights of integers alone need groups (of {_KNOWN_GROUPS}), as in "
                "'nk:g128' or by --groups, and others have none."
            )
        if self.w_group is not None and self.w_group not in (*GROUP_SIZES, max(1, self.k)):
            raise InvalidProblem(
                f"groups of {self.w_group} elements of w are not supported; use {_KNOWN_GROUPS}."
            )

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

    def _check_attention(self) -> None:
        if not self.operation.has_values:
            if self.least_n is not None:
                raise InvalidProblem(
                    f"n = {self._n_text} is a range, which the operation 'attention' alone has; "
                    "give the number of columns of w."
                )
            masks = [step.text for step in self.epilogue.steps if step.kind.hides]
            if masks:
                raise InvalidEpilogue(
                    f"epilogue step {masks[0]!r} hides scores of attention, but the operation is "
                    f"{self.operation.value!r}: leave it out."
                )
            return
        if self.types != OperandTypes.of(self.types.x) or self.types.x not in _TYPES_OF_ATTENTION:
            raise InvalidProblem(
                f"attention is not computed in the types {self.types.text}; use one of: "
                f"{', '.join(_TYPES_OF_ATTENTION)}."
            )
        if self.w_layout is not WeightLayout.NK or self.w_group is not None or self.is_fixed:
            raise InvalidProblem(
                "attention has keys as (n, k), no groups of weights and no fixed order of "
                "additions; leave the weight layout and the reduction as they are by default."
            )
        if not 1 <= self.k <= MAX_HEAD_SIZE:
            raise InvalidProblem(
                f"heads of {self.k} elements are not supported; use a head size from 1 to "
                f"{MAX_HEAD_SIZE}."
            )
        refused = [step.text for step in self.epilogue.steps if step.kind.name not in _OF_SCORES]
        names = [step.kind.name for step in self.epilogue.steps]
        if refused or names != sorted(set(names), key=_OF_SCORES.index):
            raise InvalidEpilogue(
                f"the steps {self.epilogue.text!r} are not those of scores; use each of "
                f"{', '.join(_OF_SCORES)} once at most, in this order, as in 'scale+add+causal'."
            )

    def _check_reduction(self) -> None:
        if not self.is_fixed:
            return
        if self.types.accumulator is DType.F16 or self.has_zero_points:
            raise InvalidProblem(
                f"types {self.types.text} have no fixed order of additions; with the reduction "
                "'fixed', use f32, bf16 or f16 added up in f32, bytes such as int8, or signed "
                "weights in groups such as bf16_s4."
            )
        undefined = [step.text for step in self.epilogue.steps if step.kind.after_product is None]
        if undefined:
            raise InvalidEpilogue(
                f"steps {', '.join(undefined)} are not defined to the bit; leave them out, or the "
                "reduction 'fixed'."
            )

    @property
    def w_bytes(self) -> int:
        """Return the size of w as the caller stores it, with its scales and zero points."""
        rows, columns = self.w_shape
        group_bytes = DType.F32.size_bytes + (1 if self.has_zero_points else 0)
        return rows * self.types.w.row_bytes(columns) + self.n * self.w_groups * group_bytes

    @classmethod
    def create(
        cls,
        m: int | str,
        n: int | str,
        k: int,
        *,
        dtype: str = DType.F32.value,
        w_layout: str = WeightLayout.NK.value,
        epilogue: str = "none",
        reduction: str = Reduction.ANY.value,
        operation: str = Operation.LINEAR.value,
    ) -> "Problem":
        """Return the problem described by plain values, as they come from a user.

        `w_layout` is `nk` or `kn`, with groups `nk:g128` or `nk:gk`; `reduction` is `any` or
        `fixed`; `operation` is `linear`, `matmul` or `attention`, which alone takes a range of n
        such as `1..4096`.

        Raises:
            InvalidProblem: a size, dtype, layout, reduction or operation cannot be used.
            InvalidEpilogue: the epilogue cannot be used.
        """
        layout, group = parse_layout(w_layout, k)
        low, high = parse_columns(n)
        return cls(
            m=Rows.parse(str(m)),
            n=high,
            least_n=low,
            k=k,
            types=_parse_types(dtype),
            w_layout=layout,
            w_group=group,
            epilogue=_parse_epilogue(epilogue),
            reduction=_parse_reduction(reduction),
            operation=Operation.parse(operation),
        )

    @classmethod
    def parse(cls, text: str) -> "Problem":
        """Return the problem written as `f32 128x3072x768 nk bias+gelu_erf`.

        The name of an operation may stand in front, and `fixed` at the end. Of attention, the
        steps follow the sizes: `attention f32 128x512x64 scale+causal`.

        Raises:
            InvalidProblem: the text does not have this form, or a size cannot be used.
            InvalidEpilogue: the epilogue cannot be used.
        """
        words = text.split()
        operation = words.pop(0) if words[:1] in _OPERATIONS else Operation.LINEAR.value
        reduction = words.pop() if words[-1:] == [Reduction.FIXED.value] else Reduction.ANY.value
        if operation == Operation.ATTENTION.value and not _are_of_layout(words[2:3]):
            words[2:2] = [WeightLayout.NK.value]
        sizes = _SIZES.fullmatch(words[1]) if 2 <= len(words) <= 4 else None
        if sizes is None:
            is_attention = operation == Operation.ATTENTION.value
            raise InvalidProblem(
                f"problem {text!r} is not understood; write it as "
                f"{_EXAMPLE_OF_ATTENTION if is_attention else _EXAMPLE}."
            )
        return cls.create(
            sizes["m"],
            sizes["n"],
            int(sizes["k"]),
            dtype=words[0],
            w_layout=words[2] if len(words) > 2 else WeightLayout.NK.value,
            epilogue=words[3] if len(words) > 3 else "none",
            reduction=reduction,
            operation=operation,
        )


_OPERATIONS = [[operation.value] for operation in Operation]

# The same few are asked for again and again, with other sizes.
_parse_types = lru_cache(maxsize=256)(OperandTypes.parse)
_parse_epilogue = lru_cache(maxsize=256)(Epilogue.parse)


def _are_of_layout(words: Sequence[str]) -> bool:
    return any(word.partition(":")[0] in {*map(str, WeightLayout)} for word in words)


def _parse_reduction(text: str) -> Reduction:
    try:
        return Reduction(text)
    except ValueError:
        raise InvalidProblem(
            f"reduction {text!r} is not known; use 'any' for the fastest order of additions, or "
            "'fixed' for results with the same bits from every kernel."
        ) from None
