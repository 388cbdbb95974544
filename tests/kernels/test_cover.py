"""Every family and type, step, word, order, layout and tail in a few hundred candidates.

The exhaustive proofs are in the other files: they vary one thing at a time, and try all of it.
"""

import pytest
from axis_words import NOTHING_SAID, OPTION_AXES, values_of, words_of
from cover import covering_set, is_first_of_family, provable_rows
from grids import toolchain_for_grid_of
from proof import prove_all

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis
from gemm_tuner.space.catalog import family_named

FAMILIES = sorted({row.family.name for row in provable_rows()})


@pytest.fixture(scope="module")
def traits() -> frozenset[str]:
    return frozenset[str]().union(*(one.traits for one in covering_set() if one.is_quick))


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.proof)])
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_that_cover_all_that_can_be_said_are_right(
    family: str, *, is_quick: bool
) -> None:
    """Of each family, the first row is compiled as served, and others at little cost."""
    chosen = [
        one for one in covering_set() if one.row.family.name == family and one.is_quick is is_quick
    ]
    first = [one.subject for one in chosen if is_first_of_family(one.row)]
    others = [one.subject for one in chosen if not is_first_of_family(one.row)]

    wrong = prove_all(first, find_toolchain())
    wrong |= prove_all(others, toolchain_for_grid_of(family_named(family)))

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


def test_every_word_that_a_candidate_can_say_here_is_covered(traits: frozenset[str]) -> None:
    plain = [(row.family, row.problem("8x64x64", "nk", "none")) for row in provable_rows()]
    words = {word for family, text in plain for word in words_of(family, Problem.parse(text))}

    said = {trait.removeprefix("word ") for trait in traits}
    assert {word for word in words if not word.startswith("grid")} <= said
    assert any(word.startswith("grid") for word in said)


@pytest.mark.parametrize("axis", OPTION_AXES, ids=lambda axis: axis.fields[0])
def test_every_option_has_values_to_draw(axis: Axis) -> None:
    unsaid, *others = values_of(axis)

    assert others
    for value in others:
        said = Candidate(
            micro_kernel=MicroKernel(family="avx512_f32", mr=8, nr=32),
            blocking=axis.put(NOTHING_SAID, value).blocking,
        )
        assert Candidate.parse(said.text) == said
    assert axis.value(NOTHING_SAID) == unsaid
