"""What a ranker is told of a candidate: figures of the problem, the CPU, the tile, the blocking."""

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import loads_per_multiplication, predict_cycles
from gemm_tuner.space.ranking import shortlist

FEATURES = (
    *("rows", "columns", "depth", "x_bytes", "w_bytes", "w_over_l2", "w_over_l3", "is_cold"),
    *("is_from_memory", "threads", "cycles", "loads", "mr", "nr", "lanes", "step_bytes"),
    *("row_waste", "column_waste"),
    *("row_blocks", "column_blocks", "depth_blocks", "kc", "panel_over_l1", "block_over_l2"),
    *("is_ir_outer", "pack_x", "pack_w", "convert_once", "prefetch", "prefetch_next", "w_streams"),
    *("shuffle_x", "stream_y", "k_unroll", "grid_m", "grid_n", "grid_k"),
)


@lru_cache(maxsize=8)
def _cycles_of_favourite(space: Space) -> float:
    """Return the model's cycles of its favourite; a search asks at each of its looks."""
    first = shortlist(space, 1)[0]
    return predict_cycles(space.problem, first, family_named(first.micro_kernel.family), space.cpu)


def features(space: Space, candidates: Iterable[Candidate]) -> NDArray[np.float32]:
    """Return a row of figures for each candidate of a space: (candidates, FEATURES).

    `cycles` are those of the model over those of its favourite; sizes are logarithms.
    """
    problem, cpu = space.problem, space.cpu
    least = _cycles_of_favourite(space)
    caches, rows = cpu.caches, max(1, problem.m.high)
    is_cold = space.regime is Regime.COLD_WEIGHTS
    of_problem = (
        log2(rows),
        log2(problem.n),
        log2(problem.k),
        problem.types.x.size_bytes,
        log2(problem.w_bytes),
        log2(problem.w_bytes / (caches.l2_bytes or 1)),
        log2(problem.w_bytes / (caches.l3_bytes or 1)),
        is_cold,
        is_cold or problem.w_bytes > caches.l3_bytes,
        space.threads,
    )

    def of_candidate(one: Candidate) -> tuple[float, ...]:
        tile, blocking = one.micro_kernel, one.blocking
        family = family_named(tile.family)
        kc, nc = min(blocking.kc, problem.k), min(blocking.nc, problem.n)
        row_bytes = problem.types.w.row_bytes
        return (
            log2(predict_cycles(problem, one, family, cpu) / least),
            loads_per_multiplication(problem, one, family),
            tile.mr,
            tile.nr,
            family.lanes,
            log2(max(1, row_bytes(tile.nr * family.k_step))),
            ceil(rows / tile.mr) * tile.mr / rows,
            ceil(problem.n / tile.nr) * tile.nr / problem.n,
            ceil(rows / blocking.mc),
            ceil(problem.n / blocking.nc),
            ceil(problem.k / blocking.kc),
            log2(kc),
            row_bytes(tile.nr * kc) / (caches.l1d_bytes or 1),
            row_bytes(nc * kc) / (caches.l2_bytes or 1),
            blocking.loop_order.is_ir_outer,
            blocking.pack_x,
            blocking.pack_w,
            blocking.convert_once,
            log2(1 + blocking.prefetch_w_bytes),
            blocking.prefetch_next_panel,
            blocking.w_streams,
            blocking.shuffle_x,
            blocking.stream_y,
            blocking.k_unroll,
            blocking.grid_m,
            blocking.grid_n,
            blocking.grid_k,
        )

    return np.array([(*of_problem, *of_candidate(one)) for one in candidates], np.float32)
