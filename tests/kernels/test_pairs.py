from itertools import combinations, product

import pytest
from pairs import all_pairs


@pytest.mark.parametrize("sizes", [(3, 4), (2, 2, 2, 2), (4, 12, 3), (2, 2, 4, 3, 4)])
def test_any_two_values_meet_in_few_combinations(sizes: tuple[int, ...]) -> None:
    axes = [range(size) for size in sizes]

    chosen = all_pairs(*axes)

    for first, second in combinations(range(len(axes)), 2):
        met = {(one[first], one[second]) for one in chosen}
        assert met == set(product(axes[first], axes[second]))
    largest, next_largest = sorted(sizes)[-1:-3:-1]
    assert len(chosen) <= 1.5 * largest * next_largest
