"""What weights that are converted may do: once for all tiles, and by blocks of whole groups."""

from math import ceil

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import Can, MicroKernelFamily
from gemm_tuner.domain.problem import Problem

UNKNOWN_L2_BYTES = 512 << 10
# From so many tiles of rows on, weights are also converted once for all at first.
TILES_THAT_CONVERT_ONCE = 4
_KC_TARGETS_BYTES = (8192, 4096, 2048)  # of a row of x, besides all of k


def depths_of_groups(problem: Problem, family: MicroKernelFamily) -> tuple[int, ...]:
    """Return the depths of a block of k, the deepest first: all of k, or whole groups."""
    k, group = max(1, problem.k), problem.w_group or 1
    if Can.UNPACK_GROUPS not in family.can or group >= k:
        return (k,)
    targets = [target // problem.types.x.size_bytes for target in _KC_TARGETS_BYTES]
    blocks = [ceil(ceil(k / ceil(k / target)) / group) * group for target in targets]
    return tuple(dict.fromkeys([k, *(kc for kc in blocks if kc < k)]))


def can_convert_once(
    problem: Problem,
    cpu: Cpu,
    family: MicroKernelFamily,
    tile: tuple[int, int],
    blocks: tuple[int, int, LoopOrder],
) -> bool:
    """Return whether several tiles meet a panel, of which a converted block fits half of L2.

    `blocks` are mc, kc and the order of the loops.
    """
    (mr, nr), (mc, kc, order) = tile, blocks
    converted_bytes = nr * kc * DType.F32.size_bytes // family.k_step
    return (
        family.converts_weights(problem.types)
        and not order.is_ir_outer
        and min(mc, problem.m.high) > mr
        and converted_bytes <= (cpu.caches.l2_bytes or UNKNOWN_L2_BYTES) // 2
    )
