"""Whether a kernel reads w where its caller stores it."""

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.packed_format import needs_column_sums
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout

_SHORT_ROW_BYTES = 1024


def reads_w_in_place(problem: Problem, blocking: Blocking) -> bool:
    """Return whether w, given in the call, is read as it lies."""
    return not (problem.operation.packs_ahead or blocking.pack_w)


def has_short_rows(problem: Problem, blocking: Blocking) -> bool:
    """Return whether w is read as it lies, and its rows are a few cache lines each.

    Read one after the other, they are one stream for the prefetchers of a core.
    """
    row_elements = problem.n if problem.w_layout is WeightLayout.KN else problem.k
    is_short = problem.types.w.row_bytes(row_elements) <= _SHORT_ROW_BYTES
    return reads_w_in_place(problem, blocking) and row_elements > 0 and is_short


def can_read_w_in_place(problem: Problem, family: MicroKernelFamily) -> bool:
    """Return whether vectors of w lie in it as the family multiplies them.

    They do along its rows: of `kn`, vectors of columns where one step of k is multiplied at once;
    of `nk`, vectors along k where k has whole ones. The sums of columns are found in packing alone.
    Of attention they are the values, which lie as `kn`.
    """
    if problem.operation.packs_ahead or needs_column_sums(problem, family):
        return False
    if problem.operation.has_values:
        return family.layout is PackedLayout.PANELS and family.k_multiple == 1
    if family.layout is PackedLayout.COLUMNS:
        return problem.w_layout is WeightLayout.NK and problem.k % family.k_step == 0
    return problem.w_layout is WeightLayout.KN and family.k_multiple == 1
