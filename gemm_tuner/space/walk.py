"""Walk along the axes: settle what was asked for, move, visit every choice, and count them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from graphlib import TopologicalSorter
from typing import Any

import numpy as np

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.space.axes import AXES
from gemm_tuner.space.axis import Axis
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile


def _by_dependence() -> tuple[Axis, ...]:
    """Return the axes so that each follows those whose fields it reads."""
    decided_by = {field: number for number, axis in enumerate(AXES) for field in axis.fields}
    order = TopologicalSorter(
        {number: {decided_by[field] for field in axis.reads} for number, axis in enumerate(AXES)}
    )
    return tuple(AXES[number] for number in order.static_order())


_BY_DEPENDENCE = _by_dependence()
_NOTHING_CHOSEN = Choice(mc=1, nc=1, kc=1)


def settled(tile: Tile, choice: Choice) -> Choice:
    """Return the choice with values that go together."""
    for axis in _BY_DEPENDENCE:
        choice = axis.settled(tile, choice)
    return choice


def tried_first(tile: Tile, **given: Any) -> Choice:  # noqa: ANN401 - of the types of the fields
    """Return the first value on each axis, except for fields that are given.

    It is not settled yet: each axis reads what was asked for on those before it.
    """
    choice = _NOTHING_CHOSEN.having(**given)
    for axis in _BY_DEPENDENCE:
        if given.keys().isdisjoint(axis.fields):
            choice = axis.tried_first(tile, choice)
    return choice


def moves(tile: Tile, choice: Choice) -> Iterator[Choice]:
    """Yield the choices one step away on some axis, some of them more than once."""
    for axis in sorted(AXES, key=lambda axis: axis.moves_last):
        yield from axis.steps(tile, choice)


def every_choice(
    tile: Tile, choice: Choice = _NOTHING_CHOSEN, decided: int = 0
) -> Iterator[Choice]:
    """Yield each settled choice once, from one for which some axes are decided."""
    if decided == len(_BY_DEPENDENCE):
        yield choice
        return
    axis = _BY_DEPENDENCE[decided]
    for other in axis.offered(tile, choice):
        yield from every_choice(tile, other, decided + 1)


def drawn_choice(tile: Tile, dice: np.random.Generator) -> Choice:
    """Return a settled choice with a value drawn on each axis, of those that are offered there."""
    choice = _NOTHING_CHOSEN
    for axis in _BY_DEPENDENCE:
        offered = list(axis.offered(tile, choice))
        choice = offered[dice.integers(len(offered))]
    return choice


def count_choices(tile: Tile) -> int:
    """Return how many settled choices there are.

    Axis by axis, those that look the same to all further ones are counted as one.
    """
    counts = Counter({_NOTHING_CHOSEN: 1})
    for axis, forgotten in zip(_BY_DEPENDENCE, _FORGOTTEN, strict=True):
        following: Counter[Choice] = Counter()
        for choice, count in counts.items():
            for other in axis.offered(tile, choice):
                following[other.having(**forgotten)] += count
        counts = following
    return counts.total()


def _read_last(field: str) -> int:
    """Return the number of the last axis that decides or reads a field."""
    return max(
        number for number, axis in enumerate(_BY_DEPENDENCE) if field in (*axis.fields, *axis.reads)
    )


# For each axis: the fields that none after it reads, as where nothing is chosen.
_FORGOTTEN = [
    {
        field.name: getattr(_NOTHING_CHOSEN, field.name)
        for field in fields(Blocking)
        if _read_last(field.name) == number
    }
    for number in range(len(_BY_DEPENDENCE))
]
