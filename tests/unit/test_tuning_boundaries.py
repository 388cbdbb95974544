"""Where the kernels of a range of m take turns."""

from dataclasses import replace

import pytest

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.rows import Rows
from gemm_tuner.tuning.ranges.boundaries import (
    Piece,
    Shape,
    candidate_of,
    first_rows,
    price_of_losses,
    rows_between,
    shapes_near,
    split,
)

SMALL, MIDDLE, LARGE = (
    Shape.of(Candidate.parse(f"avx2_f32_{mr}x16 mc{mr}_nc64_kc96 jc_ic_jr_ir"), 1)
    for mr in (1, 4, 6)
)


@pytest.mark.parametrize(
    ("low", "high", "rows"),
    [
        (1, 512, (1, 2, 3, 6, 12, 23, 42, 79, 147, 274, 512)),
        (1, 64, (1, 2, 3, 6, 11, 20, 35, 64)),  # not all of them powers of two
        (0, 3, (1, 2, 3)),
        (17, 64, (17, 33, 64)),
        (1, 2, (1, 2)),
    ],
)
def test_the_first_rows_are_the_ends_and_some_with_a_constant_ratio(
    low: int, high: int, rows: tuple[int, ...]
) -> None:
    assert first_rows(Rows(low=low, high=high)) == rows


def test_the_first_rows_of_any_range_are_few() -> None:
    rows = first_rows(Rows(low=1, high=2**31 - 1))

    assert len(rows) == 14
    assert (rows[0], rows[-1]) == (1, 2**31 - 1)


def test_each_kernel_gets_the_rows_where_it_loses_least() -> None:
    speeds = {
        1: {SMALL: 2.0, MIDDLE: 1.0},
        4: {SMALL: 1.0, MIDDLE: 2.0, LARGE: 1.5},
        16: {MIDDLE: 2.0, LARGE: 1.9},
        64: {MIDDLE: 1.0, LARGE: 2.0},
    }

    pieces = split(speeds)

    assert [(one.low, one.high, one.shape) for one in pieces] == [
        (1, 1, SMALL),
        (4, 16, MIDDLE),
        (64, 64, LARGE),
    ]
    # Between 1 and 4 is 2, between 16 and 64 is 32.
    assert rows_between(pieces, speeds) == (2, 32)


@pytest.mark.parametrize(
    ("of_middle", "of_small", "boundary"),
    [(1.97, 1.0, 4), (1.97, 1.99, 15), (1.0, 1.97, 15), (1.0, 1.0, 8)],
)
def test_a_kernel_that_loses_little_beside_another_has_all_rows_between(
    of_middle: float, of_small: float, boundary: int
) -> None:
    """Of the first it is the speed at 4 rows, of the other at 16."""
    speeds = {
        1: {SMALL: 2.0, MIDDLE: 1.0},
        4: {SMALL: 2.0, MIDDLE: of_middle},
        16: {SMALL: of_small, MIDDLE: 2.0},
        64: {SMALL: 1.0, MIDDLE: 2.0},
    }
    pieces = split(speeds)

    assert rows_between(pieces, speeds) == ((8,) if boundary == 8 else ())
    assert candidate_of(pieces, Rows(low=1, high=64), speeds).below[0].rows == boundary


@pytest.mark.parametrize(
    ("m", "shapes"),
    [
        (1, [SMALL]),
        (2, [SMALL, MIDDLE]),  # at the end of its piece
        (3, [SMALL, MIDDLE]),  # between two
        (4, [MIDDLE, SMALL]),
        (8, [MIDDLE, SMALL]),  # the best of a neighbour
        (32, [LARGE, MIDDLE, SMALL]),
        (64, [LARGE]),
    ],
)
def test_once_a_range_was_split_few_kernels_may_be_best_at_an_m(
    m: int, shapes: list[Shape]
) -> None:
    pieces = (Piece(1, 2, SMALL), Piece(4, 16, MIDDLE), Piece(32, 64, LARGE))
    best = {1: SMALL, 2: SMALL, 4: MIDDLE, 8: MIDDLE, 16: SMALL, 32: LARGE, 64: LARGE}

    assert list(shapes_near(m, best, pieces)) == shapes


def test_a_kernel_that_wins_less_than_it_is_worth_is_left_out() -> None:
    speeds = {1: {SMALL: 2.01, MIDDLE: 2.0}, 4: {SMALL: 1.0, MIDDLE: 2.0}}

    assert [one.shape for one in split(speeds)] == [MIDDLE]


def test_small_gains_at_few_rows_leave_a_kernel_for_what_loses_much_later() -> None:
    """Each of eight m would win 5 % by a kernel of its own; 64 and 128 lose half without theirs."""
    own = [
        Shape(Candidate.parse(f"avx2_f32_1x16 mc{m}_nc64_kc96 jc_ic_jr_ir"), holds_all_rows=False)
        for m in range(1, 9)
    ]
    speeds = {
        m: {MIDDLE: 1.9, LARGE: 1.0} | {one: 2.0 if one is mine else 1.0 for one in own}
        for m, mine in enumerate(own, start=1)
    }
    speeds |= {
        64: {MIDDLE: 1.0, LARGE: 2.0, SMALL: 1.0},
        128: {MIDDLE: 1.0, LARGE: 1.0, SMALL: 2.0},
    }

    pieces = split(speeds)

    assert len(pieces) == 8
    assert [one.shape for one in pieces[-2:]] == [LARGE, SMALL]


def test_there_are_no_more_kernels_than_a_candidate_holds() -> None:
    shapes = [
        Shape(Candidate.parse(f"avx2_f32_1x16 mc{m}_nc64_kc96 jc_ic_jr_ir"), holds_all_rows=False)
        for m in range(1, 13)
    ]
    speeds = {
        m: {shape: 2.0 if place == m else 1.9 for place, shape in enumerate(shapes)}
        for m in range(12)
    }

    pieces = split(speeds)

    assert len(pieces) == 8
    assert candidate_of(pieces, Rows(low=0, high=11), speeds).text.count(" | ") == 7


def test_boundaries_lie_between_what_was_measured_and_blocks_hold_their_rows() -> None:
    speeds = {1: {SMALL: 2.0}, 9: {MIDDLE: 2.0}, 10: {LARGE: 2.0}}

    candidate = candidate_of(split(speeds), Rows(low=1, high=20), speeds)

    assert candidate.text == (
        "..3 avx2_f32_1x16 mc3_nc64_kc96 jc_ic_jr_ir | "
        "..9 avx2_f32_4x16 mc12_nc64_kc96 jc_ic_jr_ir | "
        "avx2_f32_6x16 mc24_nc64_kc96 jc_ic_jr_ir"
    )
    assert Candidate.parse(candidate.text) == candidate


def test_one_kernel_for_all_is_told_from_one_that_was_tuned_for_the_greatest_m() -> None:
    speeds = {1: {LARGE: 2.0}, 20: {LARGE: 2.0}}

    candidate = candidate_of(split(speeds), Rows(low=0, high=20), speeds)

    assert candidate != LARGE.at(20)
    # There is one copy of its code all the same, that for the greatest m.
    assert list(candidate.kernels(Rows(low=0, high=20))) == [(Rows(low=0, high=20), LARGE.at(20))]


def test_no_m_pays_for_what_the_others_win() -> None:
    for_one, for_all = [0.0] * 8 + [0.33, 0.16], [0.06] * 10

    assert sum(for_one) < sum(for_all)
    assert price_of_losses(for_all) < price_of_losses(for_one)
    # Where the worst is alike, the mean counts.
    assert price_of_losses([0.1, 0.0]) < price_of_losses([0.1, 0.1])


def test_a_block_that_holds_all_rows_is_the_same_kernel_for_any_m() -> None:
    for_four, for_nine = (
        Candidate.parse(f"avx2_f32_4x16 mc{mc}_nc64_kc96 jc_ic_jr_ir") for mc in (4, 12)
    )

    assert Shape.of(for_four, 4) == Shape.of(for_nine, 9)
    assert Shape.of(for_four, 4).at(9) == for_nine
    # What cuts the rows into blocks keeps them.
    assert Shape.of(for_four, 9).at(100) == for_four
    assert replace(for_nine, below=()) == for_nine
