"""The two products that a kernel of attention is made of."""

from dataclasses import dataclass, replace
from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout


def phases_of(problem: Problem, blocking: Blocking) -> int:
    """Return in how many phases a kernel computes a call: in two where slices are brought together.

    They are slices of k, or of the keys of attention.
    """
    return 2 if blocking.grid_k > 1 or cuts_keys(problem, blocking) else 1


def cuts_keys(problem: Problem, blocking: Blocking) -> bool:
    """Return whether parts of a call have slices of the keys."""
    return problem.operation.has_values and blocking.grid_n > 1


def dot_columns(problem: Problem, family: MicroKernelFamily, tile: MicroKernel) -> int:
    """Return how many keys a tile of dot products reads side by side in place; 0 if it cannot.

    Heads are whole vectors then. Blocks of keys hold whole tiles.
    """
    if family.dot is None or problem.k % family.dot.k_step:
        return 0
    return max((nr for nr in (2, 4, 8) if (tile.mr, nr) in family.dot.tiles), default=0)


@dataclass(frozen=True, slots=True)
class OneProduct:
    """One of the two products of a block of keys, and the candidate and family that compute it."""

    problem: Problem
    candidate: Candidate
    family: MicroKernelFamily


def products_of_attention(
    problem: Problem, candidate: Candidate, family: MicroKernelFamily
) -> dict[str, OneProduct]:
    """Return the products with the keys and with the values of one block.

    Keys are packed in whole panels or read in place, the values as the candidate says; what is read
    in place is fetched ahead. The sums of the values
    stay in y from one block of keys to the next: there are at least two blocks of k, as far as the
    product knows.
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
        pack_w=not blocking.dot_keys,
        prefetch_w_bytes=blocking.prefetch_w_bytes if blocking.dot_keys else 0,
        k_unroll=blocking.k_unroll,
    )
    of_values = replace(
        of_scores,
        nc=ceil(problem.k / tile.nr) * tile.nr,
        kc=nc,
        pack_w=blocking.pack_w,
        prefetch_w_bytes=0 if blocking.pack_w else blocking.prefetch_w_bytes,
    )
    with_keys = replace(candidate, blocking=of_scores)
    family_of_keys = family
    if blocking.dot_keys:
        assert family.dot is not None
        columns = dot_columns(problem, family, tile)
        dot_tile = MicroKernel(family=family.dot.name, mr=tile.mr, nr=columns)
        with_keys = replace(with_keys, micro_kernel=dot_tile)
        family_of_keys = family.dot
    return {
        "scores": OneProduct(scores, with_keys, family_of_keys),
        "values": OneProduct(values, replace(candidate, blocking=of_values), family),
    }
