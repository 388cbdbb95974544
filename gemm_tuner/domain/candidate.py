"""A candidate: one micro-kernel under one blocking, a kernel that could be generated."""

import re
from dataclasses import dataclass

from gemm_tuner.domain.blocking import WORDS, Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.words import pattern_of, values_in
from gemm_tuner.errors import InvalidCandidate

MAX_CHARACTERS = 1000  # as in a record
_TEXT = re.compile(rf"(?P<micro_kernel>\w+) {pattern_of(WORDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to compute a problem.

    The text form is `avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pack_x pf4096 u4 grid1x2`: the
    micro-kernel, then the words of the blocking.
    """

    micro_kernel: MicroKernel
    blocking: Blocking

    @property
    def text(self) -> str:
        """Return the text form, which `parse` reads back."""
        return f"{self.micro_kernel.text} {self.blocking.text}"

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
        return len(self.blocking.extras)

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """Return the candidate written in the text form.

        Raises:
            InvalidCandidate: the text does not have this form.
        """
        match = _TEXT.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
        if match is None:
            raise InvalidCandidate(
                f"candidate {text[:MAX_CHARACTERS]!r} is not understood; write it as "
                "'avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir pf4096'."
            )
        return cls(
            micro_kernel=MicroKernel.parse(match["micro_kernel"]),
            # The pattern of a word has only what its fields can be.
            blocking=Blocking(**values_in(WORDS, match.groupdict())),  # type: ignore[arg-type]
        )
