"""Candidates drawn at random from the whole space, which holds what no list does."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, lcm
from random import Random

from axis_words import OPTION_AXES, allows, values_of
from other_encoding import needed_here
from proof import Subject

from gemm_tuner.bench.emulator import can_prove
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import MAX_HEAD_SIZE, Problem
from gemm_tuner.domain.weight_layout import GROUP_SIZES, WHOLE_COLUMN
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.limits import check_covers

_FIXED = 0.3  # of the problems that can have a fixed order of additions
_OF_ACTIVATIONS = 0.3  # of those without quantised weights: products of two activations
_OF_ATTENTION = 0.6  # of those whose products attention has
_STEPS_OF_SCORES = (
    "none",
    "scale",
    "add",
    "causal",
    "scale+add",
    "scale+causal",
    "scale+add+causal",
)
_TYPES_OF_SCORES = [OperandTypes.of(x, y=DType.F32) for x in (DType.F32, DType.BF16, DType.F16)]


def draw_subjects(count: int, seed: int) -> list[Subject]:
    """Return different problems with candidates, the same for the same seed and CPU."""
    cpu = detect_cpu()
    families = [one for one in CATALOG.values() if can_prove(needed_here(one.isa), cpu=cpu)]
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
        attends = types is None and self.random.random() < _OF_ATTENTION
        types = types or self.random.choice(sorted(family.types, key=lambda one: one.text))
        high = self.random.randint(0, 4 * mr + 2)
        low = self.random.choice((high, self.random.randint(0, high)))
        rows = str(high) if low == high else f"{low}..{high}"
        if attends and types in _TYPES_OF_SCORES:
            return self.attention(types.x, rows, 4 * nr)
        n = self.random.choice((self.random.randint(0, 4 * nr), nr * self.random.randint(1, 4)))
        whole = family.k_multiple * self.random.randint(1, 6)
        k = self.random.choice((whole, *(self.random.randint(0, most) for most in (8, 80, 400))))
        layout = self.random.choice(("nk", "kn"))
        if types.is_weight_only:
            layout += f":g{self.random.choice((*GROUP_SIZES, WHOLE_COLUMN))}"
        problem = f"{types.text} {rows}x{n}x{k} {layout} {self.epilogue(types)}"
        has_zero_points = types.is_weight_only and not types.w.is_signed
        is_defined = types.accumulator is not DType.F16 and not has_zero_points
        can_be_fixed = family.can_be_fixed and is_defined
        is_fixed = can_be_fixed and self.random.random() < _FIXED
        is_linear = types.is_weight_only or self.random.random() >= _OF_ACTIVATIONS
        operation = "linear" if is_linear else "matmul"
        return Problem.parse(
            f"{operation} {problem} fixed" if is_fixed else f"{operation} {problem}"
        )

    def attention(self, x: DType, rows: str, most_keys: int) -> Problem:
        """Return a problem of attention, whose keys may be a range."""
        high = self.random.randint(1, most_keys)
        keys = self.random.choice((str(high), f"{self.random.randint(0, high)}..{high}"))
        head = self.random.randint(1, self.random.choice((8, 80, MAX_HEAD_SIZE)))
        steps = self.random.choice(_STEPS_OF_SCORES)
        return Problem.parse(f"attention {x.value} {rows}x{keys}x{head} {steps}")

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
        micro_kernel = MicroKernel(family=family.name, mr=mr, nr=nr)
        attends = problem.operation.has_values
        whole_columns = lcm(nr, family.k_multiple) if attends else nr
        choice = Choice(
            mc=mr * self.random.randint(1, 4),
            nc=whole_columns * self.random.randint(1, 4),
            kc=ceil(problem.k / family.k_multiple) * family.k_multiple
            if attends
            else self.kc(family, problem),
            loop_order=self.random.choice(
                [order for order in LoopOrder if not (attends and order.is_jc_outer)]
            ),
        )
        for axis in OPTION_AXES:
            unsaid, *others = values_of(axis)
            said = axis.put(choice, self.random.choice((unsaid, self.random.choice(others))))
            if allows(axis, problem, family, micro_kernel, said):
                choice = said
        return Candidate(micro_kernel=micro_kernel, blocking=choice.blocking)

    def kc(self, family: MicroKernelFamily, problem: Problem) -> int:
        """Return the depth of blocks of k: all of k, or a part."""
        multiple = problem.w_group or family.k_multiple
        whole = ceil(max(1, problem.k) / family.k_multiple) * family.k_multiple
        return self.random.choice((whole, multiple * self.random.randint(1, 3)))
