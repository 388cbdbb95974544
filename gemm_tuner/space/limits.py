"""Why a register tile cannot work for a problem, or cannot be the best: one predicate a reason."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.in_place import can_read_w_in_place
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.space.axes import AXES
from gemm_tuner.space.catalog import CATALOG, family_named

# The share of lanes without a column from which on dot products are tried beside outer products.
_IDLE_LANES = 0.1
# With so few rows of x, dot products over the rows of w take less than to pack it: measured on an
# EPYC of Zen 3, up to 8 rows with k = 64.
_ROWS_IN_PLACE = 16

Limit = Callable[[Problem, Cpu, MicroKernelFamily, int, int], bool]


def has_other_types(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the family computes other element types."""
    return problem.product_types not in family.types


def adds_in_another_order(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the problem asks for a fixed order of additions, which the family lacks."""
    return problem.is_fixed and not family.can_be_fixed


def attends_to_nothing(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the problem is attention, whose two products are not such as the family's."""
    return problem.operation.has_values and not _can_attend(family)


def needs_missing_isa(
    _problem: Problem, cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the CPU lacks an instruction set that the family needs."""
    return not family.isa <= cpu.isa


def has_rows_to_spare(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, mr: int, _nr: int
) -> bool:
    """Return whether the tile is taller than x ever is, beyond what whole registers need."""
    return mr >= max(1, problem.m.high) + family.register_rows


def has_columns_to_spare(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, nr: int
) -> bool:
    """Return whether the tile is wider than w, beyond what whole vectors need."""
    if family.layout is PackedLayout.COLUMNS:
        return nr > max(1, problem.n)
    return nr >= max(1, problem.n) + family.lanes


def wastes_short_sums(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether vectors along k would be mostly empty, or vectors of columns are nearly full.

    A single row has no such choice to make: weights are read once either way. Nor have a few that
    read w where it lies, which to pack takes as long as to multiply.
    """
    if family.layout is not PackedLayout.COLUMNS:
        return False
    width = ceil(problem.n / family.lanes) * family.lanes
    is_nearly_full = problem.n >= 2 * family.lanes and width - problem.n < width * _IDLE_LANES
    reads_in_place = problem.m.high <= _ROWS_IN_PLACE and can_read_w_in_place(problem, family)
    has_no_choice = problem.m.high == 1 or reads_in_place
    return problem.k < family.lanes or (is_nearly_full and not has_no_choice)


LIMITS: tuple[Limit, ...] = (
    has_other_types,
    adds_in_another_order,
    attends_to_nothing,
    needs_missing_isa,
    has_rows_to_spare,
    has_columns_to_spare,
    wastes_short_sums,
)


def is_possible(problem: Problem, cpu: Cpu, family: MicroKernelFamily, mr: int, nr: int) -> bool:
    """Return whether no limit speaks against the tile."""
    return not any(limit(problem, cpu, family, mr, nr) for limit in LIMITS)


def check_covers(problem: Problem, candidate: Candidate) -> MicroKernelFamily:
    """Return the family of a candidate that someone chose, which need not run here.

    Raises:
        InvalidCandidate: the family does not compute the problem, or has no such register tile,
            or a kernel of the family does not have what a word says; or several kernels are not
            for this range of m, or do not read the same packed weights.
    """
    if candidate.below:
        return _check_covers_together(problem, candidate)
    tile = candidate.micro_kernel
    family = family_named(tile.family)
    if problem.product_types not in family.types:
        raise InvalidCandidate(
            f"family {family.name} does not compute {problem.product_types.text}; "
            f"it computes: {', '.join(sorted(types.text for types in family.types))}."
        )
    if problem.operation.has_values and not _can_attend(family):
        raise InvalidCandidate(
            f"family {family.name} does not compute attention, whose sums wait in memory between "
            "blocks of keys; choose one of outer products, such as avx2_f32."
        )
    if problem.is_fixed and not family.can_be_fixed:
        fixed = (one.name for one in CATALOG.values() if _could_compute(problem, one))
        raise InvalidCandidate(
            f"family {family.name} does not add in the fixed order that {problem.text!r} asks for; "
            f"these do: {', '.join(fixed)}."
        )
    if (tile.mr, tile.nr) not in family.tiles:
        raise InvalidCandidate(
            f"family {family.name} has no register tile {tile.mr}x{tile.nr}; "
            "choose one whose sums fit its registers in whole vectors."
        )
    for axis in AXES:
        refusal = axis.refused(problem, family, tile, candidate.blocking)
        if refusal:
            remedy = refusal.remedy or f"leave the word out of {candidate.text!r}"
            raise InvalidCandidate(f"a kernel {tile.text} has no {refusal.what}; {remedy}.")
    return family


def _can_attend(family: MicroKernelFamily) -> bool:
    """Return whether sums of a family, over any depth, go to memory and are added to there."""
    return family.layout is PackedLayout.PANELS and not family.partial_steps


def _could_compute(problem: Problem, family: MicroKernelFamily) -> bool:
    return problem.types in family.types and family.can_be_fixed


def _check_covers_together(problem: Problem, candidate: Candidate) -> MicroKernelFamily:
    if not problem.m.low <= candidate.below[0].rows <= candidate.below[-1].rows < problem.m.high:
        raise InvalidCandidate(
            f"candidate {candidate.text!r} has boundaries that m = {problem.m.text} does not "
            "have; leave out the kernels that would never be called."
        )
    kernels = list(candidate.kernels(problem.m))
    family, *_same = [check_covers(replace(problem, m=rows), kernel) for rows, kernel in kernels]
    formats = {packed_format(problem, kernel, family) for _rows, kernel in kernels}
    if len(formats) > 1:
        raise InvalidCandidate(
            f"kernels of {candidate.text!r} read weights packed in different ways, "
            f"{' and '.join(sorted(formats))}; choose those that share one."
        )
    return family
