"""Every family and type, step, word, order, layout and tail in a few hundred candidates.

The exhaustive proofs are in the other files: they vary one thing at a time, and try all of it.
"""

import pytest
from cover import covering_set, provable_rows
from proof import prove_all

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.epilogue import STEP_KINDS

FAMILIES = sorted({row.family.name for row in provable_rows()})


@pytest.fixture(scope="module")
def traits() -> frozenset[str]:
    return frozenset[str]().union(*(one.traits for one in covering_set()))


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_that_cover_all_that_can_be_said_are_right(family: str) -> None:
    subjects = [one.subject for one in covering_set() if one.row.family.name == family]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong


def test_every_family_with_every_type_is_covered(traits: frozenset[str]) -> None:
    rows = provable_rows()

    assert {f"family {row.family.name}" for row in rows} <= traits
    assert {row.name for row in rows} == {one.row.name for one in covering_set()}


def test_every_step_of_the_epilogue_is_covered(traits: frozenset[str]) -> None:
    assert {f"step {name}" for name in STEP_KINDS} <= traits


def test_every_order_layout_and_tail_is_covered(traits: frozenset[str]) -> None:
    blocks = ("none", "one", "several")
    tails = [f"{axis} {count}" for axis in "nk" for count in ("one", "several")]
    rests = [f"{axis} {count} and a rest" for axis in "nk" for count in blocks]

    assert {*tails, *rests} <= traits
    assert {f"word {order.value}" for order in LoopOrder} <= traits
    assert {"layout nk", "layout kn", "m exact", "m of a range"} <= traits


@pytest.mark.parametrize(
    "word", ["pack_x", "pf", "pf_next", "u", "ws", "convert_once", "shuffle_x", "stream_y"]
)
def test_every_word_of_a_candidate_is_covered(word: str, traits: frozenset[str]) -> None:
    assert f"word {word}" in traits
