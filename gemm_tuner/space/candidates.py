"""The candidates for a problem on a CPU: every one, and the neighbours of one.

A candidate is a register tile and one value on each axis of `space/axes`. The search starts from
what `space/first.py` says of a tile, and moves along one axis at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.space.axes.blocks import offered_cuts
from gemm_tuner.space.axes.grid import grids
from gemm_tuner.space.catalog import CATALOG, family_named
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.first import first_choices
from gemm_tuner.space.limits import is_possible
from gemm_tuner.space.tile import Tile
from gemm_tuner.space.walk import count_choices, drawn_choice, every_choice, moves, settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that could be generated for a problem on a CPU with a number of threads.

    With `like`, a candidate for the same layer with any m, only what reads weights packed as by it.
    The regime decides what is tried first, not what there is.
    """

    problem: Problem
    cpu: Cpu
    threads: int = 1
    like: Candidate | None = None
    regime: Regime = Regime.HOT

    def __contains__(self, candidate: Candidate) -> bool:
        """Return whether the packed weights of `candidate` lie as they have to."""
        return self.like is None or self._format(candidate) == self.packed_format

    @property
    def packed_format(self) -> str:
        """Return the one format of packed weights that is searched, empty if it is any."""
        return self._format(self.like) if self.like else ""

    def tiles(self) -> Iterator[Tile]:
        """Yield the register tiles that no limit speaks against."""
        for family in CATALOG.values():
            for mr, nr in family.tiles:
                if is_possible(self.problem, self.cpu, family, mr, nr):
                    yield self._tile(family, mr, nr)

    def defaults(self) -> list[Candidate]:
        """Return, for each tile, the blockings to try first.

        Raises:
            NoKernelFamily: no family of the catalog covers the problem on this CPU.
        """
        found = dict.fromkeys(
            candidate
            for tile in self.tiles()
            for choice in first_choices(tile)
            for candidate in islice(self._by_grid(tile, choice), 1)
        )
        if not found:
            packed = f" in the format {self.packed_format!r}" if self.like else ""
            raise NoKernelFamily(
                f"no kernel family covers {self.problem.text!r}{packed} on {self.cpu.brand}; "
                'run "gemm-tuner cpu" to see what there is.'
            )
        return list(found)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates that differ from `candidate` in one choice, each once."""
        tile = self._tile_of(candidate)
        found = dict.fromkeys(
            neighbour
            for choice in _choices_like(tile, candidate)
            for neighbour in self._one_step_away(tile, choice)
            if neighbour in self
        )
        found.pop(candidate, None)
        return list(found)

    def cuts_of(self, candidate: Candidate) -> list[Candidate]:
        """Return `candidate` cut for the threads in each way that its tile allows, one part last.

        There are none if `candidate` is not of this space.
        """
        tile = self._tile_of(candidate)
        found = dict.fromkeys(
            cut for choice in _choices_like(tile, candidate) for cut in self._by_grid(tile, choice)
        )
        return list(found)

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate, each once."""
        for tile in self.tiles():
            for choice in every_choice(tile):
                candidate = tile.candidate(choice.blocking)
                if candidate in self:
                    yield candidate

    def draw(self, dice: np.random.Generator) -> Candidate | None:
        """Return a candidate of a tile drawn at random, with a value drawn on each axis.

        None if what was drawn is not of this space.
        """
        tiles = list(self.tiles())
        if not tiles:
            return None
        tile = tiles[dice.integers(len(tiles))]
        candidate = tile.candidate(drawn_choice(tile, dice).blocking)
        return candidate if candidate in self else None

    def size(self) -> int:
        """Return how many candidates there are in any format, without making them all."""
        return sum(count_choices(tile) for tile in self.tiles())

    def _tile(self, family: MicroKernelFamily, mr: int, nr: int) -> Tile:
        return Tile(
            problem=self.problem,
            cpu=self.cpu,
            threads=self.threads,
            regime=self.regime,
            like=self.like,
            family=family,
            mr=mr,
            nr=nr,
        )

    def _tile_of(self, candidate: Candidate) -> Tile:
        micro_kernel = candidate.micro_kernel
        return self._tile(family_named(micro_kernel.family), micro_kernel.mr, micro_kernel.nr)

    def _by_grid(self, tile: Tile, choice: Choice) -> Iterator[Candidate]:
        """Yield the candidates that differ from `choice` in the grid at most, the best first."""
        for m, n, k in grids(tile):
            candidate = _candidate(tile, choice.having(grid_m=m, grid_n=n, grid_k=k))
            if candidate in self:
                yield candidate

    def _one_step_away(self, tile: Tile, choice: Choice) -> Iterator[Candidate]:
        for other in moves(tile, choice):
            yield _candidate(tile, other)
        for beside in self._tiles_beside(tile):
            yield _candidate(beside, choice)

    def _tiles_beside(self, tile: Tile) -> Iterator[Tile]:
        """Yield the family's tiles one register higher or lower, and the tallest one step off.

        A step is one vector, or a panel where their width is given.
        """
        family = tile.family
        possible = [
            size for size in family.tiles if is_possible(self.problem, self.cpu, family, *size)
        ]
        vector = tile.given_panel or family.lanes
        step = 1 if family.layout is PackedLayout.COLUMNS else vector
        for mr, nr in possible:
            if nr == tile.nr and abs(mr - tile.mr) == family.register_rows:
                yield tile.beside(mr, nr)
        for nr in (tile.nr - step, tile.nr + step):
            heights = [height for height, width in possible if width == nr]
            if heights:
                yield tile.beside(max(heights), nr)

    def _format(self, candidate: Candidate) -> str:
        return packed_format(self.problem, candidate, family_named(candidate.micro_kernel.family))


def _candidate(tile: Tile, choice: Choice) -> Candidate:
    """Return the candidate that a choice stands for."""
    return tile.candidate(settled(tile, choice).blocking)


def _choices_like(tile: Tile, candidate: Candidate) -> Iterator[Choice]:
    """Yield the choices that stand for `candidate`; several cuts may come to the same."""
    for cut in offered_cuts(tile, candidate.blocking):
        choice = Choice.of(candidate.blocking, cut)
        if settled(tile, choice) == choice:
            yield choice
