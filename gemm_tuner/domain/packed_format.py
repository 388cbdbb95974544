"""The name of a layout of packed weights: kernels with the same name share one packed copy."""

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem


def needs_column_sums(problem: Problem, family: MicroKernelFamily) -> bool:
    """Return whether the sums of the columns of w lie behind the packed weights.

    They do where x has an offset: zero points, or what makes one of two operands with the same
    sign the other.
    """
    has_zero_points = any(step.kind.is_offset for step in problem.epilogue.steps)
    has_one_sign = problem.types.x is problem.types.w
    return has_zero_points or (has_one_sign and family.product.needs_two_signs)


def packed_format(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> str:
    """Return everything that the bytes of packed weights depend on, besides the weights.

    Such as `f32 768x3072 panels nr48 kc512`: the type of w, n, k, the layout, columns in a panel,
    steps of k in a block if there are several, steps of k side by side if there are several
    (`k4`), columns in the last panel if it is narrower (`last16`), what k is padded to if that is
    more than the steps side by side (`whole32`), and `sums` if those of the columns follow. It is
    the same for both orders in which the caller may store w. It is `none` where nothing is packed
    ahead of calls.
    """
    if not problem.operation.packs_ahead:
        return "none"
    if family.layout is PackedLayout.GROUPS:
        return _groups_format(problem, candidate, family)
    words = [problem.types.w.value, f"{problem.n}x{problem.k}", family.layout.value]
    if family.layout is PackedLayout.PANELS:
        width = family.panel_width(candidate.packed_columns)
        words.append(f"nr{width}")
        rest = problem.n % width
        if rest:
            words.append(f"last{-(-rest // family.lanes) * family.lanes}")
        if candidate.blocking.kc < problem.k:
            words.append(f"kc{candidate.blocking.kc}")
    if family.k_step > 1:
        words.append(f"k{family.k_step}")
    if family.k_tile and problem.k % family.k_tile:
        words.append(f"whole{family.k_tile}")
    if needs_column_sums(problem, family):
        words.append("sums")
    return " ".join(words)


def _groups_format(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> str:
    """Return such as `u4 768x3072 groups nr64 g128 lanes16 k2`, lanes being columns in a vector."""
    steps = " k2" if family.packs_pairs(problem.types) else ""
    return (
        f"{problem.types.w.value} {problem.n}x{problem.k} {family.layout.value} "
        f"nr{candidate.packed_columns} g{problem.w_group} lanes{family.lanes}{steps}"
    )
