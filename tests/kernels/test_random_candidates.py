"""A few candidates drawn from the whole space, the same in each run.

    RANDOM_SEEDS=100 pytest -n auto tests/kernels/test_random_candidates.py

proves 1200 instead of 48.
"""

import os

import pytest
from proof import prove_all
from random_candidates import draw_subjects

from gemm_tuner.build.toolchain import find_toolchain

SEEDS = int(os.environ.get("RANDOM_SEEDS", "4"))


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(SEEDS))
def test_candidates_drawn_at_random_are_right(seed: int) -> None:
    wrong = prove_all(draw_subjects(12, seed), find_toolchain())

    assert not wrong


def test_the_same_seed_draws_the_same() -> None:
    assert draw_subjects(5, 1) == draw_subjects(5, 1) != draw_subjects(5, 2)
