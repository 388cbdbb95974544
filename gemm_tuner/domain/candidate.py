"""A candidate: one micro-kernel under one blocking, a kernel that could be generated.

Of a problem with a range of m, it may be several of these, each for the m up to a boundary.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from gemm_tuner.domain.blocking import WORDS, Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.words import pattern_of, values_in
from gemm_tuner.errors import InvalidCandidate

MOST_KERNELS = 8
MAX_CHARACTERS = 250 * MOST_KERNELS  # also in a record
_TEXT = re.compile(rf"(?P<micro_kernel>\w+) {pattern_of(WORDS)}")
_BETWEEN = " | "
_UP_TO = re.compile(r"\.\.(?P<rows>[0-9]{1,10}) (?P<kernel>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpTo:
    """The kernel of a candidate for calls of up to `rows` rows, more than those before it take."""

    rows: int
    kernel: "Candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to compute a problem.

    The text form is `avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pack_x pf4096 u4 grid1x2`: the
    micro-kernel, then the words of the blocking.

    Where there are several kernels for a range of m, those `below` compute calls of fewer rows, up
    to their boundaries, and this one computes the others. All are of one family. The text form is
    `..4 avx2_f32_4x24 mc4_... | ..64 avx2_f32_4x16 mc64_... | avx2_f32_6x16 mc516_...`.

    Raises:
        InvalidCandidate: the kernels are too many, of several families, or not in order.
    """

    micro_kernel: MicroKernel
    blocking: Blocking
    below: tuple[UpTo, ...] = ()

    def __post_init__(self) -> None:
        """Check the kernels for fewer rows."""
        boundaries = [one.rows for one in self.below]
        if boundaries != sorted(set(boundaries)) or len(boundaries) >= MOST_KERNELS:
            raise InvalidCandidate(
                f"kernels up to m = {', '.join(map(str, boundaries))} and above are not one "
                f"candidate; give each boundary once, in order, for {MOST_KERNELS} kernels at most."
            )
        kernels = (self, *(one.kernel for one in self.below))
        families = {one.micro_kernel.family for one in kernels}
        if len(families) > 1 or any(one.below for one in kernels[1:]):
            raise InvalidCandidate(
                f"kernels of {', '.join(sorted(families))} are not one candidate; choose those "
                "of one family, each of a single blocking."
            )

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        below = [f"..{one.rows} {one.kernel.text}" for one in self.below]
        return _BETWEEN.join((*below, f"{self.micro_kernel.text} {self.blocking.text}"))

    def kernels(self, rows: Rows) -> Iterator[tuple[Rows, "Candidate"]]:
        """Yield what computes a range of m: the kernels, each with the part of the range it has.

        Neighbours that are the same kernel are one.
        """
        low, last = rows.low, UpTo(rows=rows.high, kernel=replace(self, below=()))
        for kernel, alike in groupby((*self.below, last), key=lambda one: one.kernel):
            high = min(rows.high, max(one.rows for one in alike))
            if low <= high:
                yield Rows(low=low, high=high), kernel
                low = high + 1

    @property
    def parts(self) -> int:
        """Return into how many parts a call can be cut."""
        return self.blocking.parts

    def threads_used(self, threads: int) -> int:
        """Return how many of `threads` a call keeps busy that is cut as it was tuned."""
        return min(self.parts, threads)

    @property
    def packed_columns(self) -> int:
        """Return the columns of a packed panel of weights."""
        return self.micro_kernel.nr // self.blocking.w_streams

    @property
    def complexity(self) -> int:
        """Return how many things the kernel does beside the arithmetic."""
        return len(self.blocking.extras) + sum(1 + one.kernel.complexity for one in self.below)

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """Return the candidate written in the text form.

        Raises:
            InvalidCandidate: the text does not have this form.
        """
        if len(text) > MAX_CHARACTERS:
            raise _not_understood(text)
        *below, last = text.split(_BETWEEN)
        return replace(_parse_one(last), below=tuple(map(_parse_up_to, below)))


def _parse_up_to(text: str) -> UpTo:
    match = _UP_TO.fullmatch(text)
    if match is None:
        raise _not_understood(text)
    return UpTo(rows=int(match["rows"]), kernel=_parse_one(match["kernel"]))


def _parse_one(text: str) -> Candidate:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _not_understood(text)
    return Candidate(
        micro_kernel=MicroKernel.parse(match["micro_kernel"]),
        # The pattern of a word has only what its fields can be.
        blocking=Blocking(**values_in(WORDS, match.groupdict())),  # type: ignore[arg-type]
    )


def _not_understood(text: str) -> InvalidCandidate:
    return InvalidCandidate(
        f"candidate {text[:MAX_CHARACTERS]!r} is not understood; write it as "
        "'avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pf4096', and those for fewer rows before "
        "it, as in '..4 avx512_f32_4x48 mc4_nc768_kc256 jc_ic_jr_ir | avx512_f32_8x48 ...'."
    )
