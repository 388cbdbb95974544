"""The two products that a kernel of attention is made of."""

from dataclasses import replace
from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.problem import Problem, WeightLayout


def phases_of(problem: Problem, blocking: Blocking) -> int:
    """Return in how many phases a kernel computes a call: in two where slices are brought together.

    They are slices of k, or of the keys of attention.
    """
    return 2 if blocking.grid_k > 1 or cuts_keys(problem, blocking) else 1


def cuts_keys(problem: Problem, blocking: Blocking) -> bool:
    """Return whether parts of a call have slices of the keys."""
    return problem.operation.has_values and blocking.grid_n > 1


def products_of_attention(
    problem: Problem, candidate: Candidate
) -> dict[str, tuple[Problem, Candidate]]:
    """Return the products with the keys and with the values of one block, each with its candidate.

    Keys are packed in whole panels, the values as the candidate says. Their sums stay in y from one
    block of keys to the next: there are at least two blocks of k, as far as the product knows.
    """
    blocking, tile = candidate.blocking, candidate.micro_kernel
    nc = blocking.nc
    scores = replace(problem.scores, n=nc, epilogue=NO_EPILOGUE)
    values = replace(scores, n=problem.k, k=2 * nc, w_layout=WeightLayout.KN)
    of_scores = Blocking(
        mc=blocking.mc,
        nc=nc,
        kc=blocking.kc,
        loop_order=blocking.loop_order,
        pack_w=True,
        k_unroll=blocking.k_unroll,
    )
    of_values = replace(
        of_scores, nc=ceil(problem.k / tile.nr) * tile.nr, kc=nc, pack_w=blocking.pack_w
    )
    return {
        "scores": (scores, replace(candidate, blocking=of_scores)),
        "values": (values, replace(candidate, blocking=of_values)),
    }
