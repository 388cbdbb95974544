"""Whether whole cache lines of y are written past the caches.

Where y takes as much as L3 or more: a line is not read before it is overwritten, and drives nothing
out. Only with AVX-512, and with one block of k, so that y is written once.

Tried first: past the caches.
"""

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile


def _choices(tile: Tile, _choice: Choice) -> tuple[bool, ...]:
    y_bytes = tile.problem.m.high * tile.problem.types.y.row_bytes(tile.problem.n)
    return (True, False) if y_bytes >= tile.cpu.caches.l3_bytes > 0 else (False,)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    can_stream = blocking.kc >= problem.k and family.can_stream(problem.types.y)
    return Refusal(what="stream_y") if blocking.stream_y and not can_stream else None


AXIS = Axis(fields=("stream_y",), reads=("kc",), choices=_choices, refusal=_refusal)
