"""A row for an axis of the space: the fields of a blocking that it decides, and how."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# Of one field, or a tuple of one for each field: the fields say of which types.
Value = Any

_UNSAID = {one.name: one.default for one in fields(Blocking)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A word that a kernel does not have, and what to do besides leaving it out."""

    what: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One row.

    An axis decides `fields` of a blocking, by one value or by a tuple of one for each field. It
    `reads` fields of others, which are settled before.

    `choices` are the values worth trying, in the order in which a search moves to them. `refusal`
    says what a kernel cannot have, be it of this space or typed by a person: what it refuses is not
    offered. `first` puts the value to try first; by default the first choice.
    `settle` makes of what was asked for what goes with the other fields; by default it stays if it
    is offered, and is the first choice otherwise. `moves` are the steps of a search; by default to
    every choice. Those that change two axes are `moves_last`. Kernels of attention have what is
    `of_attention`; the fields of other axes stay as they are where nothing is said.
    """

    fields: tuple[str, ...]
    choices: Callable[[Tile, Choice], Iterable[Value]]
    reads: tuple[str, ...] = ()
    refusal: (
        Callable[[Problem, MicroKernelFamily, MicroKernel, Blocking], Refusal | None] | None
    ) = None
    first: Callable[[Tile, Choice], Choice] | None = None
    settle: Callable[[Tile, Choice], Choice] | None = None
    moves: Callable[[Tile, Choice], Iterator[Choice]] | None = None
    moves_last: bool = False
    of_attention: bool = False
    # Returns the value that a choice has on this axis.
    value: Callable[[Blocking], Value] = field(init=False, repr=False, compare=False)
    _unsaid: Value = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare what a search asks for at each step."""
        unsaid = tuple(_UNSAID[name] for name in self.fields)
        object.__setattr__(self, "value", attrgetter(*self.fields))
        object.__setattr__(self, "_unsaid", unsaid if len(unsaid) > 1 else unsaid[0])

    def offered(self, tile: Tile, choice: Choice) -> Iterator[Choice]:
        """Yield the choice with each value that a kernel can have."""
        if not self._is_for(tile.problem):
            yield self.put(choice, self._unsaid)
            return
        for value in dict.fromkeys(self.choices(tile, choice)):
            other = self.put(choice, value)
            if not self._refuses(tile, other):
                yield other

    def tried_first(self, tile: Tile, choice: Choice) -> Choice:
        """Return the choice with the value to try first."""
        if self.first and self._is_for(tile.problem):
            return self.first(tile, choice)
        return next(self.offered(tile, choice))

    def settled(self, tile: Tile, choice: Choice) -> Choice:
        """Return the choice with a value that goes with the fields that this axis reads."""
        if not self._is_for(tile.problem):
            return self.put(choice, self._unsaid)
        if self.settle:
            return self.settle(tile, choice)
        if self.value(choice) in self.choices(tile, choice) and not self._refuses(tile, choice):
            return choice
        return next(self.offered(tile, choice))

    def steps(self, tile: Tile, choice: Choice) -> Iterator[Choice]:
        """Yield the choices one step away."""
        if not self._is_for(tile.problem):
            return
        yield from self.moves(tile, choice) if self.moves else self.offered(tile, choice)

    def refused(
        self,
        problem: Problem,
        family: MicroKernelFamily,
        tile: MicroKernel,
        blocking: Blocking,
    ) -> Refusal | None:
        """Return why a kernel cannot have the value of a blocking; None if it can."""
        if not self._is_for(problem) and self.value(blocking) != self._unsaid:
            return Refusal(what=f"{' or '.join(self.fields)}: it computes {problem.text!r}")
        return self.refusal(problem, family, tile, blocking) if self.refusal else None

    def _is_for(self, problem: Problem) -> bool:
        return self.of_attention or not problem.operation.has_values

    def put(self, choice: Choice, value: Value) -> Choice:
        """Return the choice with another value on this axis."""
        values = value if isinstance(value, tuple) else (value,)
        return choice.having(**dict(zip(self.fields, values, strict=True)))

    def _refuses(self, tile: Tile, choice: Choice) -> bool:
        """Return whether a kernel of a problem that has this axis cannot have this value."""
        if self.refusal is None:
            return False
        return self.refusal(tile.problem, tile.family, tile.micro_kernel, choice) is not None
