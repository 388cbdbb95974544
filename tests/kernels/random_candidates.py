"""Candidates drawn at random from the whole space, which holds what no list does."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from random import Random

from other_encoding import needed_here
from proof import Subject

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import parse_isa
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import GROUP_SIZES, WHOLE_COLUMN, Problem
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.limits import check_covers

EMULATED = parse_isa(("amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx512_fp16"))
PREFETCHES = ("", "", " pf4096", " pf16384", " pf_next")


def draw_subjects(count: int, seed: int) -> list[Subject]:
    """Return different problems with candidates, the same for the same seed and CPU."""
    provable = detect_cpu().isa | EMULATED
    families = [one for one in CATALOG.values() if needed_here(one.isa) <= provable]
    return list(islice(_subjects(_Dice(Random(seed)), families), count))


def draw_subject(random: Random, family: MicroKernelFamily, types: OperandTypes) -> Subject:
    """Return a problem of these types with a candidate of the family."""
    return next(_subjects(_Dice(random), [family], types))


def draw_of_family(random: Random, family: MicroKernelFamily) -> Iterator[Subject]:
    """Yield problems with candidates of a family, which need not run here."""
    yield from _subjects(_Dice(random), [family])


def _subjects(
    dice: "_Dice", families: list[MicroKernelFamily], types: OperandTypes | None = None
) -> Iterator[Subject]:
    while True:
        family = dice.random.choice(families)
        tile = dice.random.choice(family.tiles)
        problem = dice.problem(family, tile, types)
        candidate = dice.candidate(family, tile, problem)
        try:
            check_covers(problem, candidate)
        except InvalidCandidate:
            continue
        yield Subject(problem=problem.text, candidate=candidate.text)


@dataclass(frozen=True, slots=True)
class _Dice:
    """What decides at random."""

    random: Random

    def problem(
        self, family: MicroKernelFamily, tile: tuple[int, int], types: OperandTypes | None
    ) -> Problem:
        """Return a problem of some tiles, whole or not, of these types or of any of the family."""
        mr, nr = tile
        types = types or self.random.choice(sorted(family.types, key=lambda one: one.text))
        high = self.random.randint(0, 4 * mr + 2)
        low = self.random.choice((high, self.random.randint(0, high)))
        n = self.random.choice((self.random.randint(0, 4 * nr), nr * self.random.randint(1, 4)))
        whole = family.k_multiple * self.random.randint(1, 6)
        k = self.random.choice((whole, *(self.random.randint(0, most) for most in (8, 80, 400))))
        layout = self.random.choice(("nk", "kn"))
        if types.is_weight_only:
            layout += f":g{self.random.choice((*GROUP_SIZES, WHOLE_COLUMN))}"
        rows = str(high) if low == high else f"{low}..{high}"
        return Problem.parse(f"{types.text} {rows}x{n}x{k} {layout} {self.epilogue(types)}")

    def epilogue(self, types: OperandTypes) -> str:
        """Return a chain of up to two offsets and four other steps."""
        offsets = [name for name, kind in STEP_KINDS.items() if kind.is_offset]
        others = [name for name in STEP_KINDS if name not in offsets]
        others += ["clamp:-0.25:2", "leaky_relu:-0.5"]
        chosen = []
        if types.accumulator is DType.S32:
            chosen += self.random.choices(offsets, k=self.random.randint(0, 2))
        if types.y is not DType.S32:
            chosen += self.random.choices(others, k=self.random.randint(0, 4))
        return "+".join(chosen) or "none"

    def candidate(
        self, family: MicroKernelFamily, tile: tuple[int, int], problem: Problem
    ) -> Candidate:
        """Return a candidate that the family may not have."""
        mr, nr = tile
        mc, nc = mr * self.random.randint(1, 4), nr * self.random.randint(1, 4)
        order = self.random.choice(list(LoopOrder)).value
        words = [
            self.maybe("pack_x"),
            self.maybe("convert_once", if_=family.converts_weights(problem.types)),
            self.random.choice(PREFETCHES),
            self.random.choice(("", "", "", " ws2", " ws4")),
            self.maybe("shuffle_x", if_=family.can_shuffle(problem.types.x)),
            self.maybe("stream_y", if_=family.can_stream(problem.types.y)),
            self.random.choice(("", " u2", " u4")),
            " grid{}x{}x{}".format(*(self.random.choice((1, 1, 2, 3)) for _axis in range(3))),
        ]
        return Candidate.parse(
            f"{family.name}_{mr}x{nr} mc{mc}_nc{nc}_kc{self.kc(family, problem)} {order}"
            + "".join(words)
        )

    def maybe(self, word: str, *, if_: bool = True) -> str:
        """Return the word of a candidate, or none."""
        return f" {word}" if if_ and self.random.random() < 0.5 else ""

    def kc(self, family: MicroKernelFamily, problem: Problem) -> int:
        """Return the depth of blocks of k: all of k, or a part."""
        multiple = problem.w_group or family.k_multiple
        whole = ceil(max(1, problem.k) / family.k_multiple) * family.k_multiple
        if family.layout is PackedLayout.COLUMNS or family.template.name == "amx_grouped":
            return whole
        return self.random.choice((whole, multiple * self.random.randint(1, 3)))
