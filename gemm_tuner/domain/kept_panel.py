"""Whether registers keep all of a packed panel, so that one row of a tile follows the other."""

from math import ceil

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.micro_kernel import Can, MicroKernelFamily
from gemm_tuner.domain.packed_format import needs_column_sums
from gemm_tuner.domain.problem import Problem

_MOST_CONSTANTS = 2  # of a step
_OTHER_REGISTERS = 1 + _MOST_CONSTANTS  # an element of x, and constants of the epilogue
_ROWS_AT_ONCE = 2


def panel_fits_registers(problem: Problem, family: MicroKernelFamily, nr: int) -> bool:
    """Return whether all of k of a panel fits beside sums and the operands of its columns.

    Not beside functions of many constants.
    """
    can_keep = Can.KEEP_PANEL in family.can and not family.vectors.are_scalars
    is_plain = can_keep and not family.partial_steps
    kinds = [step.kind for step in problem.epilogue.steps]
    if not is_plain or problem.k == 0 or any(kind.registers > _MOST_CONSTANTS for kind in kinds):
        return False
    operands = sum(kind.operand is OperandShape.ROW_VECTOR for kind in kinds)
    if needs_column_sums(problem, family):
        operands += 2
    of_column = ceil(problem.k / family.k_step) + _ROWS_AT_ONCE + operands
    return nr // family.lanes * of_column + _OTHER_REGISTERS <= family.registers


def keeps_panel(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> bool:
    """Return whether a kernel does: where it can, unless a word says how it walks along k."""
    blocking = candidate.blocking
    walks = blocking.k_unroll > 1 or blocking.w_streams > 1 or blocking.shuffle_x
    fetches = blocking.prefetch_w_bytes > 0 or blocking.prefetch_next_panel
    if walks or fetches or blocking.convert_once or blocking.kc < problem.k:
        return False
    return panel_fits_registers(problem, family, candidate.micro_kernel.nr)
