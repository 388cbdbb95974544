"""Why a register tile cannot work for a problem, or cannot be the best: one predicate a reason."""

from collections.abc import Callable
from math import ceil

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.space.axes import AXES
from gemm_tuner.space.catalog import CATALOG, family_named

# The share of lanes without a column from which on dot products are tried beside outer products.
_IDLE_LANES = 0.1

Limit = Callable[[Problem, Cpu, MicroKernelFamily, int, int], bool]


def has_other_types(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the family computes other element types."""
    return problem.types not in family.types


def adds_in_another_order(
    problem: Problem, _cpu: Cpu, family: MicroKernelFamily, _mr: int, _nr: int
) -> bool:
    """Return whether the problem asks for a fixed order of additions, which the family lacks."""
    return problem.is_fixed and not family.can_be_fixed


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

    A single row has no such choice to make: weights are read once either way.
    """
    if family.layout is not PackedLayout.COLUMNS:
        return False
    width = ceil(problem.n / family.lanes) * family.lanes
    is_nearly_full = problem.n >= 2 * family.lanes and width - problem.n < width * _IDLE_LANES
    return problem.k < family.lanes or (problem.m.high > 1 and is_nearly_full)


LIMITS: tuple[Limit, ...] = (
    has_other_types,
    adds_in_another_order,
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
            or a kernel of the family does not have what a word says.
    """
    tile = candidate.micro_kernel
    family = family_named(tile.family)
    if problem.types not in family.types:
        raise InvalidCandidate(
            f"family {family.name} does not compute {problem.types.text}; "
            f"it computes: {', '.join(sorted(types.text for types in family.types))}."
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
        refusal = axis.refusal and axis.refusal(problem, family, tile, candidate.blocking)
        if refusal:
            remedy = refusal.remedy or f"leave the word out of {candidate.text!r}"
            raise InvalidCandidate(f"a kernel {tile.text} has no {refusal.what}; {remedy}.")
    return family


def _could_compute(problem: Problem, family: MicroKernelFamily) -> bool:
    return problem.types in family.types and family.can_be_fixed
