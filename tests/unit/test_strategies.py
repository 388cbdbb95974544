"""Strategies: each proposes what there is, once, and comes to an end."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recordings import PROBLEM, first_candidates, make_ranker, make_recording
from samples import CPU

from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.features import FEATURES, features
from gemm_tuner.strategies.halving import SuccessiveHalving
from gemm_tuner.strategies.local_search import LocalSearch
from gemm_tuner.strategies.ranker import Ranker, read_ranker, write_ranker
from gemm_tuner.strategies.strategy import BATCH
from gemm_tuner.strategies.table import STRATEGIES, Plan, make_strategy

SPACE = Space(problem=PROBLEM, cpu=CPU)
RECORDED = RecordedSpace.of(make_recording(dict.fromkeys(first_candidates(), 500.0)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_proposes_what_there_is_until_it_is_over(name: str) -> None:
    seeds, elsewhere = RECORDED.recorded[-2:], RECORDED.recorded[-5:-4]
    plan = Plan(name=name, ranker=make_ranker())
    strategy = make_strategy(RECORDED, plan, seeds=seeds, elsewhere=elsewhere)
    speeds: dict[Candidate, float] = {}
    first: list[Candidate] = []

    while (batch := strategy.propose(speeds)).candidates:
        assert len(batch.candidates) == len(set(batch.candidates)) <= BATCH
        assert set(batch.candidates) <= set(RECORDED.recorded)
        # Only with more samples is a candidate proposed again.
        assert speeds.keys().isdisjoint(batch.candidates) == (batch.sample_factor == 1)
        first = first or list(batch.candidates)
        speeds |= {one: 1.0 / (2 + len(one.text)) for one in batch.candidates}

    assert first[:2] == list(seeds)
    assert elsewhere[0] in first
    assert strategy.pending == 0 or name == "learned"  # what it knows of and does not propose
    assert len(speeds) == RECORDED.size() or name not in {"exhaustive", "random"}


def test_a_local_search_has_favourites_and_neighbours_of_the_fastest_in_turn() -> None:
    search = LocalSearch(SPACE)
    favourites = shortlist(SPACE, 24)
    first = search.propose({}).candidates
    speeds = dict.fromkeys(first, 1.0)
    best, better = favourites[5], favourites[9]
    speeds[best] = 2.0
    near = [one for one in SPACE.neighbours(best) if one not in first]

    second = search.propose(speeds).candidates
    third = search.propose(speeds | dict.fromkeys(second, 1.0) | {better: 3.0}).candidates

    assert list(first) == favourites[:8]
    left = [one for one in favourites[8:] if one not in near[:6]]
    assert list(second) == [*near[:6], *left[:2]]
    beside_better = [one for one in SPACE.neighbours(better) if one not in {*first, *second}]
    assert list(third[:6]) == beside_better[:6]


def test_a_local_search_is_over_when_batches_bring_less_than_half_a_percent() -> None:
    search = LocalSearch(SPACE)
    proposed: list[Candidate] = []
    speeds: dict[Candidate, float] = {}
    batches = 0
    while batch := search.propose(speeds).candidates:
        proposed += batch
        speeds |= {one: 1.0 + len(proposed) / 1e6 for one in batch}
        batches += 1

    assert set(shortlist(SPACE, 24)) <= set(proposed)
    assert len(proposed) == len(set(proposed)) <= 8 * batches
    assert batches < 16  # of a space of thousands
    assert search.propose(speeds | {proposed[0]: 1.02}).candidates


def test_halving_times_the_best_third_again_with_more_samples() -> None:
    search = SuccessiveHalving(RECORDED, seed=1)
    speeds: dict[Candidate, float] = {}
    timed_with: dict[int, list[Candidate]] = {1: [], 3: [], 9: []}

    while len(timed_with[9]) < 3:
        batch = search.propose(speeds)
        timed_with[batch.sample_factor] += batch.candidates
        speeds |= {one: 1.0 + RECORDED.recorded.index(one) for one in batch.candidates}

    drawn = sorted(timed_with[1], key=lambda one: -RECORDED.recorded.index(one))
    assert len(drawn) == 27
    assert set(timed_with[3]) == set(drawn[:9])
    assert set(timed_with[9]) == set(drawn[:3])


def test_candidates_are_drawn_from_the_whole_space() -> None:
    dice = np.random.default_rng(3)

    drawn = [one for _turn in range(40) if (one := SPACE.draw(dice))]

    assert all(map(SPACE.cuts_of, drawn))  # they are of this space
    assert len(set(drawn)) > 35
    again = np.random.default_rng(3)
    assert [SPACE.draw(again) for _turn in range(5)] == drawn[:5]


def test_a_ranker_follows_its_trees(tmp_path: Path) -> None:
    ranker = make_ranker()
    path = tmp_path / "ranker.json"

    write_ranker(path, ranker)
    read = read_ranker(path)

    assert read == ranker
    one, other = RECORDED.recorded[:2]
    rows = features(RECORDED, [one, other])
    rows[:, FEATURES.index("mr")] = [4, 5]
    assert read.predict(rows).tolist() == [2.0, 2.5]


def _loop(facts: dict[str, list[dict[str, list[float]]]]) -> None:
    facts["trees"][0]["left"][0] = 0


def _forget(facts: dict[str, list[str]]) -> None:
    facts["features"].pop()


def _inflate_place(facts: dict[str, list[dict[str, list[float]]]]) -> None:
    facts["trees"][0]["feature"][1] = 10**30


def _deepen(facts: dict[str, list[object]]) -> None:
    """Make a tree of one long branch: each level takes the time of a look at all candidates."""
    inner, leaves = 300, 301
    facts["trees"][0] = {
        "feature": [0] * inner + [-2] * leaves,
        "threshold": [0.0] * (inner + leaves),
        "left": [*range(1, inner), inner, *[-1] * leaves],
        "right": [*range(inner + 1, inner + leaves), *[-1] * leaves],
        "value": [1.0] * (inner + leaves),
    }


def _inflate_value(facts: dict[str, list[dict[str, list[float]]]]) -> None:
    facts["trees"][0]["value"][1] = 1e308


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_loop, "node 0 leads nowhere"),
        (_forget, "trained on other features"),
        (_inflate_place, "trees.0.feature.1: .*less than"),
        (_inflate_value, "trees.0.value.1: .*less than"),
        (_deepen, "node 256 has more than 256 questions above it"),
    ],
)
def test_a_ranker_that_cannot_be_followed_is_one_error(
    spoil: Callable[[object], None], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "ranker.json"
    facts = json.loads(make_ranker().model_dump_json())
    spoil(facts)
    path.write_text(json.dumps(facts))

    with pytest.raises(InvalidSetting, match=rf"ranker.json is no ranker: .*{told}"):
        read_ranker(path)


def test_a_ranker_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="gemm-tuner model train"):
        read_ranker(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("named", "told"),
    [({"name": "guess"}, "'guess' is not known"), ({"name": "learned"}, "needs a ranker")],
)
def test_a_plan_without_its_strategy_or_ranker_is_refused(named: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        Plan(**named)  # type: ignore[arg-type]  # only names


@pytest.mark.proof
def test_exported_trees_predict_what_scikit_learn_does() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from gemm_tuner.replay.training import exported, fitted  # noqa: PLC0415 - as it is optional

    dice = np.random.default_rng(5)
    rows = dice.normal(size=(300, len(FEATURES))).astype(np.float32)
    targets = rows[:, 3] * np.sin(rows[:, 11]) + 0.1 * dice.normal(size=300)

    model = fitted(rows, targets)
    ranker = Ranker.model_validate_json(exported(model).model_dump_json())

    others = dice.normal(size=(200, len(FEATURES))).astype(np.float32)
    assert ranker.predict(others).tolist() == model.predict(others).tolist()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "guess"], "strategy 'guess' is not known; use one of local, exhaustive"),
        (["--ranker", "one.json"], "--ranker is for --strategy learned"),
        (["--strategy", "learned", "--ranker", "one.json"], "there is no ranker in one.json"),
        (["--strategy", "random", "--target", "zen4"], "leave out --strategy"),
        (["--ranker", "one.json", "--scheduler", "tcp://127.0.0.1:9"], "--ranker is for a sweep"),
    ],
)
def test_a_sweep_by_a_strategy_that_it_cannot_use_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "8", "8", "8", *arguments]) == 2

    assert told in capsys.readouterr().err
