"""Few combinations of values in which any two meet."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*axes: Sequence[Hashable]) -> list[tuple[Any, ...]]:
    """Return combinations of a value from each axis, in which any two values of two axes meet.

    It is for axes that the templates treat one by one. Of axes that interact, give the product as
    one axis: any value of another meets each of its combinations.
    """
    everything = list(product(*axes))
    missing = {pair for one in everything for pair in _pairs_of(one)}
    chosen = []
    while missing:
        best = max(everything, key=lambda one: len(missing.intersection(_pairs_of(one))))
        missing.difference_update(_pairs_of(best))
        chosen.append(best)
    return chosen


def _pairs_of(combination: Sequence[Hashable]) -> Iterator[Hashable]:
    return combinations(enumerate(combination), 2)
