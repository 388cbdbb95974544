"""How many packed panels a tile reads side by side.

One to six or eight, for up to four rows of x and weights that half of L2 does not keep. In a given
format as many as make up a tile, which may be wider than its panels. Only outer products in whole
vectors, and weights packed ahead. Of weights in groups, each vector of the tile has a panel of its
own.

Tried first: one, or what the format asks for. Where weights are cold or fill half of L3 or more, or
where more than two streams are faster on this core (`space/cores.csv`), also as many as are
fastest, two or eight, or as many less as make up the tile, with deep blocks of k and without
prefetch. One row reads many streams before all else on such a core.
"""

from collections.abc import Iterator

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# So few rows of x wait for their weights.
_FEW_ROWS = 4
_STREAMS = (2, 3, 4, 5, 6, 8)


def _choices(tile: Tile, choice: Choice) -> Iterator[int]:
    problem = tile.problem
    # Panels of groups are as deep as k.
    is_whole = choice.kc >= problem.k or tile.family.layout is PackedLayout.PANELS
    if problem.operation.packs_ahead and tile.given_panel:
        yield _panels_in(tile, tile.given_panel) if is_whole else 1
        return
    yield 1
    # Cold weights are not in L2, however small they are; x and y take a part of it.
    if problem.m.high <= _FEW_ROWS and problem.w_bytes > tile.l2_bytes // 2:
        for streams in _STREAMS:
            if is_whole and _can_split(problem, tile.family, tile.nr, streams):
                yield streams


def _panels_in(tile: Tile, columns: int) -> int:
    """Return how many panels make up a tile, or one if it cannot be read so."""
    panels, rest = divmod(tile.nr, columns)
    can_split = panels > 1 and _can_split(tile.problem, tile.family, tile.nr, panels)
    return panels if can_split and rest == 0 else 1


def _can_split(problem: Problem, family: MicroKernelFamily, columns: int, streams: int) -> bool:
    """Return whether a tile of some columns may be panels side by side.

    Those of weights in groups are each as wide as a vector.
    """
    can_read = Can.READ_PANELS_SIDE_BY_SIDE in family.can and problem.operation.packs_ahead
    vectors = columns // family.lanes
    if family.layout is PackedLayout.GROUPS:
        return can_read and vectors == streams and not family.vectors.are_scalars
    return can_read and vectors % streams == 0


def _refusal(
    problem: Problem, family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    streams = blocking.w_streams
    is_whole = family.layout is PackedLayout.PANELS or blocking.kc >= problem.k
    if streams == 1 or (is_whole and _can_split(problem, family, tile.nr, streams)):
        return None
    return Refusal(what=f"ws{streams}")


AXIS = Axis(fields=("w_streams",), reads=("kc",), choices=_choices, refusal=_refusal)
