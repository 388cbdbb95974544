"""Replays of made-up recordings, of which the answers are known."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from recordings import PROBLEM, first_candidates, make_ranker, make_recording

from gemm_tuner.bench.sample import Sample
from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.replay.comparison import compare
from gemm_tuner.replay.figures import figures_of
from gemm_tuner.replay.leaving import Leaving, leaving
from gemm_tuner.replay.recorded_trials import ends_side_by_side
from gemm_tuner.replay.recording import read_recordings, write_recordings
from gemm_tuner.replay.replaying import Replay
from gemm_tuner.replay.samples import Pair, Samples
from gemm_tuner.resources import tuning_db_dir
from gemm_tuner.strategies.table import Plan

CANDIDATES = first_candidates(24)
EXHAUSTIVE = Plan(name="exhaustive")


def times(best: int, count: int = 24) -> dict[Candidate, float]:
    """Return times of the first 24 candidates: 500 ns, and 400 of one."""
    return dict.fromkeys(CANDIDATES[:count], 500.0) | {CANDIDATES[best]: 400.0}


def test_the_clock_counts_builds_proofs_and_samples_as_recorded() -> None:
    """Of 8, four are built while the host prepares in 2 s, two at a time in a second each.

    The other four take 2 s, and all proofs 1 s. A request took 1 s, of which 15 samples of 0.4 ms
    of 25 runners are 0.15 s: so 0.034 s for each. A race has 6 samples of the best and of the
    baseline, and 3 of the others, which are clearly slower.
    """
    found = Replay(make_recording(times(best=3)), budget_s=30).run(EXHAUSTIVE)

    first_s = 2 + 2 + 1 + 9 * (0.85 / 25) + (2 * 6 + 7 * 3) * 0.0004
    assert found.regrets[0][0] == pytest.approx(first_s, abs=1e-3)
    assert found.regrets[0][1] == 0.0
    assert found.near_best_s == found.regrets[0][0]
    assert found.regret_at(first_s - 0.01) == 1.0


def test_a_best_of_the_last_batch_is_found_in_its_turn() -> None:
    found = Replay(make_recording(times(best=20)), budget_s=60).run(EXHAUSTIVE)

    assert found.regrets[0][1] == pytest.approx(0.2)
    assert found.near_best_s == pytest.approx(3 * 5.33 + 0.0, abs=0.05)
    assert found.winner_regret == 0.0
    assert found.tried == 24
    figures = figures_of([found])
    assert figures.regrets == pytest.approx((1.0, 1.0, 0.2, 0.0))
    assert figures.near_best_median_s == figures.near_best_90th_s == found.near_best_s
    assert figures.wrong_winners == 0.0


def test_what_there_is_no_time_for_is_not_tried() -> None:
    found = Replay(make_recording(times(best=20)), budget_s=8).run(EXHAUSTIVE)

    assert found.tried < 20
    assert found.near_best_s == float("inf")
    assert found.winner_regret == pytest.approx(0.2)
    assert figures_of([found]).wrong_winners == 1.0


def test_what_failed_is_not_timed() -> None:
    failed = first_candidates(27)[24:]

    found = Replay(make_recording(times(best=3), failed=failed), budget_s=90).run(EXHAUSTIVE)

    assert found.tried == 27
    assert found.winner_regret == 0.0


def test_noise_that_was_recorded_can_make_a_wrong_winner() -> None:
    """A candidate of 440 ns takes 330 in the longest of its visits; the best always takes 400."""
    lucky = CANDIDATES[5]
    recording = make_recording(times(best=3) | {lucky: 440.0}, lucky=lucky)

    speeds = Samples(recording).speeds()
    found = Replay(recording, budget_s=60).run(EXHAUSTIVE)

    assert max(speeds, key=lambda one: speeds[one]) == CANDIDATES[3]
    assert speeds[CANDIDATES[3]] / speeds[lucky] == pytest.approx(440 / 400)
    assert found.winner_regret == pytest.approx(1 - 400 / 440)
    assert figures_of([found]).wrong_winners == 1.0


def test_finals_of_leaders_say_how_fast_they_are() -> None:
    """Of visits of 400 and 380 ns, finals make 390 and 480; what was behind takes 410."""
    best, lucky, behind = CANDIDATES[:3]
    visits = dict.fromkeys(CANDIDATES, 500.0) | {best: 400.0, lucky: 380.0, behind: 410.0}
    recording = make_recording(visits, leaders={best: (390.0,) * 3, lucky: (480.0,) * 3})

    speeds = Samples(recording).speeds()

    assert max(speeds, key=lambda one: speeds[one]) == best
    assert speeds[best] / speeds[lucky] == pytest.approx(480 / 390)
    # By the leaders, the machine is 0.91 times as fast as in the visits.
    change = (400 / 390 + 380 / 480) / 2
    assert speeds[lucky] / speeds[CANDIDATES[5]] == pytest.approx(500 / 480 / change)
    # What was behind the leaders in the visits is no faster than the fastest of them.
    assert speeds[behind] == min(speeds[best], speeds[CANDIDATES[5]] * 500 / 410)


def test_leaders_are_compared_in_the_same_rounds() -> None:
    """The machine is slower in every other pair of finals, by more than the leaders differ."""
    slow = (1.0, 1.03, 1.03, 1.0, 1.0, 1.03)
    leaders = {
        one: [ns * factor for factor in slow]
        for one, ns in zip(CANDIDATES[:2], (400.0, 410.0), strict=True)
    }
    recording = make_recording(dict.fromkeys(leaders, 400.0), leaders=leaders)

    replay = Replay(recording, budget_s=60)
    found = [replay.run(Plan(name="exhaustive", seed=seed)) for seed in range(8)]

    assert [one.winner_regret for one in found] == [0.0] * 8


def test_no_search_is_judged_by_the_finals_that_it_saw() -> None:
    """A search draws from the second final, in which the slower one was lucky."""
    best, lucky = CANDIDATES[:2]
    leaders = {best: (400.0, 400.0, 400.0), lucky: (440.0, 300.0, 440.0)}
    replay = Replay(make_recording(dict.fromkeys(leaders, 400.0), leaders=leaders), budget_s=60)

    found = replay.run(EXHAUSTIVE)

    assert found.winner_regret == pytest.approx(1 - 400 / 440)


def test_a_machine_that_slowed_down_favours_nobody_who_was_timed_before() -> None:
    """Who was 5 % behind in the visits is no faster when leaders take a tenth longer."""
    best, behind = CANDIDATES[:2]
    visits = {best: 400.0, behind: 420.0}
    replay = Replay(make_recording(visits, leaders={best: (440.0,) * 4}), budget_s=60)

    found = [replay.run(Plan(name="exhaustive", seed=seed)) for seed in range(4)]

    assert [one.winner_regret for one in found] == [0.0] * 4


def test_what_was_calm_is_calm_at_another_speed() -> None:
    """A thread that waited for a tenth of 20 ms did not wait for a fifth of 10 ms."""
    slow = Sample(elapsed_ns=20_000_000, involuntary_switches=0, waited_ns=2_000_000)
    pair = Pair(ours=slow, calls=1, theirs=slow, baseline_calls=1, stolen=0.0, others=0.0)

    faster = pair.at_speed(2.0)

    assert faster.call_ns == pair.call_ns / 2
    assert faster.is_calm
    assert not faster.is_disturbed


def test_what_one_final_of_the_leaders_gets_wrong_is_told() -> None:
    """Of three finals, the last finds one the fastest that takes 10 % more in the others."""
    best, lucky = CANDIDATES[:2]
    leaders = {best: (400.0, 400.0, 400.0), lucky: (440.0, 440.0, 380.0)}

    regrets = Samples(make_recording(times(best=0), leaders=leaders)).regrets_of_one_final()

    assert regrets == pytest.approx([0.0, 0.0, 1 - 400 / 440])
    assert Samples(make_recording(times(best=0))).regrets_of_one_final() == []
    only = make_recording(times(best=0), leaders={best: (400.0,), lucky: (440.0,)})
    assert Samples(only).regrets_of_one_final() == []


def test_a_disturbed_final_waits_as_a_sweep_does() -> None:
    calm, disturbed = (
        Replay(make_recording(times(best=3), waited_ns=waited_ns), budget_s=60).run(EXHAUSTIVE)
        for waited_ns in (0, 1_000_000)
    )

    assert disturbed.regrets[-1][0] > calm.regrets[-1][0] + 10
    assert disturbed.winner_regret == 0.0


@pytest.mark.parametrize("name", ["local", "random", "halving", "learned"])
def test_the_same_seed_searches_the_same(name: str) -> None:
    replay = Replay(make_recording(times(best=9)), budget_s=40)

    first, again, other = (
        replay.run(Plan(name=name, seed=seed, ranker=make_ranker())) for seed in (3, 3, 4)
    )

    assert first == again
    assert first.winner_regret == 0.0
    if name in {"random", "halving"}:
        assert other != first


def test_tasks_go_to_whoever_is_free() -> None:
    assert ends_side_by_side([3.0, 1.0, 1.0, 2.0], 2) == [3.0, 1.0, 2.0, 4.0]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl.gz"
    write_recordings(
        path, [make_recording(times(best=9, count=12), regime=regime) for regime in Regime]
    )
    return path


def _replayed(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> Mapping[str, dict[str, dict[str, object]]]:
    assert run(["replay", *arguments, "--json"]) == 0
    facts: dict[str, dict[str, dict[str, object]]] = json.loads(capsys.readouterr().out)
    return facts


def test_the_command_compares_strategies(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(recorded), "--strategy", "exhaustive", "--strategy", "random"]

    first = _replayed([*arguments, "--repeats", "2", "--budget", "60s"], capsys)
    again = _replayed([*arguments, "--repeats", "2", "--budget", "60s"], capsys)

    assert first == again
    assert [*first["strategies"]] == ["exhaustive", "random"]
    found = first["strategies"]["exhaustive"]
    assert found["runs"] == 4
    assert found["wrong_winners"] == 0.0
    assert found["near_best_median_s"] == found["near_best_90th_s"] == pytest.approx(8.52, abs=0.01)
    assert [one["problem"] for one in first["problems"]] == [PROBLEM.text] * 2  # type: ignore[index]
    assert run(["replay", *arguments, "--repeats", "1", "--budget", "60s"]) == 0
    table = capsys.readouterr().out
    assert "exhaustive" in table
    assert "8.5 s" in table


def test_one_problem_is_compared_without_a_ranker_of_others(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(recorded), "--repeats", "1", "--budget", "8s", "--json"]) == 0

    printed = capsys.readouterr()
    assert [*json.loads(printed.out)["strategies"]] == ["local", "exhaustive", "random", "halving"]
    assert 'Leaving out "learned": a ranker for a problem is trained on others' in printed.err
    assert run(["replay", str(recorded), "--strategy", "local", "--strategy", "learned"]) == 2
    refused = capsys.readouterr().err
    assert "record at least 2 problems" in refused
    assert "replay: local" not in refused  # no search before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy", "guess"], "strategy 'guess' is not known; use one of local, "),
        (["--repeats", "0"], "--repeats 0 is out of range"),
        (
            ["--ranker", "/nowhere.json", "--strategy", "local"],
            "--ranker is for --strategy learned",
        ),
        (["--ranker", "/nowhere.json"], "there is no ranker in /nowhere.json"),
        (["--budget", "soon"], "duration 'soon' is not understood"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    arguments: list[str], told: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(recorded), *arguments]) == 2

    assert told in capsys.readouterr().err


def test_a_file_without_recordings_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl.gz"
    write_recordings(empty, [])

    assert run(["replay", str(empty)]) == 2
    assert run(["replay", str(tmp_path / "none.jsonl.gz")]) == 2

    told = capsys.readouterr().err
    assert 'is empty; fill it by "gemm-tuner model record"' in told
    assert "none.jsonl.gz cannot be read" in told


@pytest.mark.parametrize(("disturbed_rounds", "left"), [(2, 0), (3, 1)])
def test_a_kernel_leaves_a_final_when_all_its_first_rounds_are_disturbed(
    disturbed_rounds: int, left: int
) -> None:
    recording = make_recording(times(best=0))
    final = recording.requests[-1]
    best = final.series[0]
    slow = tuple(2 * one for one in best.elapsed_ns[:disturbed_rounds])
    disturbed = best.model_copy(update={"elapsed_ns": (*slow, *best.elapsed_ns[disturbed_rounds:])})
    changed = final.model_copy(update={"series": (disturbed, *final.series[1:])})
    requests = (*recording.requests[:-1], changed)

    found = leaving([recording.model_copy(update={"requests": requests})])

    assert found == Leaving(took_part=3, left=left)  # 33 rounds: those of three processes


@pytest.mark.proof
def test_the_rule_that_ends_a_final_seldom_errs_on_recorded_noise() -> None:
    (path,) = (tuning_db_dir() / "replay").glob("AuthenticAMD-1a-2-*.jsonl.gz")

    found = leaving(read_recordings(path))

    assert found.took_part > 10_000
    assert found.share < 0.02


@pytest.mark.proof
def test_a_ranker_that_was_trained_on_other_problems_leads_to_the_best() -> None:
    """Calls take longer the wider a tile is, in both problems; the model thinks otherwise."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    recordings = []
    for text in ("f32 64x64x64 nk none", "f32 96x128x64 nk none"):
        problem = Problem.parse(text)
        recordings.append(
            make_recording(
                {one: 400.0 + 10 * one.micro_kernel.nr for one in first_candidates(None, problem)},
                problem=problem,
            )
        )

    found = compare(
        recordings,
        ["learned", "random"],
        budget_s=120,
        seeds=[0, 1],
        ranker=None,
        report=lambda _stage, _done, _total: None,
    )

    learned, drawn = (figures_of([run for runs in found[name] for run in runs]) for name in found)
    assert learned.near_best_90th_s < drawn.near_best_median_s
    assert learned.wrong_winners == 0.0
    assert all(run.regrets[0][1] < 0.02 for runs in found["learned"] for run in runs)
