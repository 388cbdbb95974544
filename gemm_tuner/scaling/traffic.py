"""Which bytes the parts of a call read from L3, from memory and from another socket."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.topology import Level, Plan
from gemm_tuner.scaling.server import Server
from gemm_tuner.scaling.shares import Piece, Shape, Shares
from gemm_tuner.space.model import moved_bytes

_Side = Callable[[Piece], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A call whose part i runs on the i-th CPU of a plan.

    Each part writes its own y and finds x in the caches near it, but what other sockets wrote of x
    passes the link. Where several sockets read a column of w, it lies in the memory of the first.
    """

    problem: Problem
    candidate: Candidate
    server: Server
    shares: Shares
    plan: Plan
    regime: Regime

    @cached_property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """Return the parts that run in each L3 group."""
        return self._parts_of(Level.L3_GROUP)

    @cached_property
    def fits_l3(self) -> bool:
        """Return whether each group's L3 holds all that its parts touch."""
        return all(not self._miss(parts) for parts in self.groups.values())

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Return which parts have to run in turn, so that each alone finds the caches as in a call.

        What a part touches stays near it, if there is room for what its L3 group touches. If not,
        the parts of a group push out each other's. What is cold was never near.
        """
        if self.regime is Regime.COLD_WEIGHTS:
            return (tuple(range(len(self.shares.parts))),)
        if self.fits_l3:
            return tuple((part,) for part in range(len(self.shares.parts)))
        return tuple(self.groups.values())

    @cached_property
    def of_parts(self) -> tuple[tuple[float, float], ...]:
        """Return what each part reads from beyond its L2, or writes there, and from memory."""
        misses = {part: self._miss(parts) for parts in self.groups.values() for part in parts}
        by_shape: dict[Shape, tuple[float, float]] = {}
        found = []
        for part, share in enumerate(self.shares.parts):
            if share.shape not in by_shape:
                by_shape[share.shape] = self._moved_bytes(part), self._touched((part,))
            moved, touched = by_shape[share.shape]
            if self.regime is Regime.COLD_WEIGHTS:
                found.append((moved, self._w_bytes((part,))))
                continue
            fits_l2 = touched <= self.server.cpu.caches.l2_bytes
            found.append((0.0 if fits_l2 else moved, touched * misses[part]))
        return tuple(found)

    def memory_bytes(self, parts: Sequence[int]) -> float:
        """Return what the parts of an L3 group read from memory, what several need once."""
        if self.regime is Regime.COLD_WEIGHTS:
            return self._w_bytes(parts)
        return self._touched(parts) * self._miss(parts)

    def _moved_bytes(self, part: int) -> float:
        pieces = problems_of_shape(self.problem, self.shares.parts[part].shape)
        return sum(moved_bytes(piece, self.candidate, self.server.cpu) for piece in pieces)

    @cached_property
    def link_bytes(self) -> float:
        """Return the most that comes into a socket from others."""
        sockets = self._parts_of(Level.SOCKET)
        if len(sockets) == 1:
            return 0.0
        of_others = (len(sockets) - 1) / len(sockets)
        most, before = 0.0, tuple[int, ...]()
        for parts in sockets.values():
            # What was in memory of a socket before, and is read here too.
            again = self._w_bytes(before) + self._w_bytes(parts) - self._w_bytes(before + parts)
            from_memory = 0.0 if self.regime is Regime.HOT and self.fits_l3 else again
            most = max(most, self._x_bytes(parts) * of_others + from_memory)
            before += parts
        return most

    def _parts_of(self, level: Level) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for part, cpu in enumerate(self.plan.places):
            found.setdefault(cpu.belongs_to(level), []).append(part)
        return {name: tuple(parts) for name, parts in found.items()}

    def _miss(self, parts: Sequence[int]) -> float:
        """Return the share of what some parts touch for which their L3 has no room."""
        touched, l3_bytes = self._touched(parts), self.server.cpu.caches.l3_bytes
        return max(0.0, 1 - l3_bytes / touched) if touched else 0.0

    def _touched(self, parts: Sequence[int]) -> float:
        return self._x_bytes(parts) + self._w_bytes(parts) + self._y_bytes(parts)

    def _x_bytes(self, parts: Iterable[int]) -> float:
        rows = self._read(parts, lambda piece: (piece.row_begin, piece.row_end))
        return rows * self.problem.types.x.size_bytes

    def _w_bytes(self, parts: Iterable[int]) -> float:
        columns = self._read(parts, lambda piece: (piece.column_begin, piece.column_end))
        return columns * self.problem.w_bytes / max(1, self.problem.n * self.problem.k)

    def _y_bytes(self, parts: Iterable[int]) -> float:
        pieces = [piece for part in parts for piece in self.shares.parts[part].pieces]
        elements = sum(piece.rows * piece.columns for piece in pieces)
        return elements * self.problem.types.y.size_bytes

    def _read(self, parts: Iterable[int], side: _Side) -> float:
        """Return how many elements some parts read of x or of w, each counted once."""
        by_slice: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        for part in parts:
            share = self.shares.parts[part]
            depth = share.k_end - share.k_begin
            _depth, spans = by_slice.setdefault(share.k_begin, (depth, []))
            spans.extend(side(piece) for piece in share.pieces)
        return sum(depth * _length(spans) for depth, spans in by_slice.values())


def problems_of_shape(problem: Problem, shape: Shape) -> Iterator[Problem]:
    """Yield the pieces of a part as problems of their own."""
    for rows, columns, depth in shape:
        yield replace(problem, m=Rows(low=rows, high=rows), n=columns, k=depth)


def _length(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many numbers are in at least one of some spans."""
    length, reached = 0, 0
    for begin, end in sorted(spans):
        length += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return length
