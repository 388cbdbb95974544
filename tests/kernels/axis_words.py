"""What the text of a candidate can say besides its blocks, as the rows of the axes have it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from gemm_tuner.domain.blocking import WORDS, Blocking
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axes import AXES
from gemm_tuner.space.axis import Axis, Value
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.walk import settled, tried_first

_OPTIONS = {field for word in WORDS if word.unsaid is not None for field in word.fields}
# Those that decide the options of a candidate, not its blocks.
OPTION_AXES = tuple(axis for axis in AXES if set(axis.fields) <= _OPTIONS)
NOTHING_SAID = Choice(mc=1, nc=1, kc=1)
_STRIDE = 7  # of the tiles of a place, the others offer the same
# Few rows and many, of weights that leave L2; a y that leaves L3; a k that threads share; a w that
# comes with each call; few queries.
_PLACES = (
    ("f32 1x4096x4096", "zen4", 1),
    ("f32 4096x8192x64", "zen4", 6),
    ("bf16 256x4096x4096", "zen4", 4),
    ("f32 256x256x8192", "zen4", 4),
    ("matmul f32 256x256x256 kn", "zen4", 1),
    ("attention f32 4x256x64", "zen4", 1),
)


@cache
def values_of(axis: Axis) -> tuple[Value, ...]:
    """Return the values that an axis offers somewhere, the one that goes unsaid in front.

    A number that only a person asks for comes with them: twice the largest.
    """
    values = dict.fromkeys([axis.value(NOTHING_SAID)])
    for text, core, threads in _PLACES:
        space = Space(problem=Problem.parse(text), cpu=core_named(core).cpu, threads=threads)
        for tile in list(space.tiles())[::_STRIDE]:
            offered = axis.offered(tile, settled(tile, tried_first(tile)))
            values |= dict.fromkeys(map(axis.value, offered))
    numbers = [value for value in values if type(value) is int]
    return (*values, 2 * max(numbers)) if numbers else tuple(values)


def words_in(candidate: str) -> Iterator[str]:
    """Yield the words of a candidate behind its blocks, numbers left out but those of a grid."""
    _tile, _blocks, *words = candidate.split()
    return (re.sub(r"(?<=[a-z])\d+(?!x)", "", word) for word in words)


def words_of(family: MicroKernelFamily, problem: Problem) -> set[str]:
    """Return the words that some axis lets a kernel of a family have for a problem."""
    tiles = [MicroKernel(family=family.name, mr=mr, nr=nr) for mr, nr in family.tiles]
    whole = replace(NOTHING_SAID, kc=max(1, problem.k))
    found = set()
    for axis in OPTION_AXES:
        for value in values_of(axis):
            said = axis.put(whole, value).blocking
            if any(allows(axis, problem, family, tile, said) for tile in tiles):
                text = Candidate(micro_kernel=tiles[0], blocking=said).text
                found |= set(words_in(text)) - {said.loop_order.value}
    return found


def allows(
    axis: Axis,
    problem: Problem,
    family: MicroKernelFamily,
    tile: MicroKernel,
    blocking: Blocking,
) -> bool:
    """Return whether an axis has nothing against a blocking."""
    return axis.refused(problem, family, tile, blocking) is None
