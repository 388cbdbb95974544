"""What a sweep confirms: threads, disturbances, and the trial that a verdict rests on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from math import inf

import pytest
from planted_times import plant_speeds
from tuned import PROBLEM, tune

from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Interference, Timing
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning import patience, sampling
from gemm_tuner.tuning.result import SweepResult

DISTURBED = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)


@pytest.mark.proof
def test_a_call_too_small_for_two_threads_stays_with_the_winner_of_one(database: str) -> None:
    alone = tune(database, baseline="scalar").verdict.candidate

    shared = _tune_for_two(database)

    assert shared.verdict.candidate is not None
    assert shared.verdict.candidate.parts == 1
    assert alone in {trial.candidate for trial in shared.finalists}


@pytest.mark.proof
def test_threads_that_only_slow_the_baseline_down_do_not_win(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of two parts take twice as long, and the baseline beside them 50 times."""
    tune(database, baseline="scalar")

    def slow_down(build: Build, found: TimedFinding, _turn: int) -> TimedFinding:
        kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
        beside = found.measurement
        if beside is None:
            return found
        kernel_ns, baseline_ns = (
            (1_000, 10_000) if kernel.native.preferred_parts == 1 else (2_000, 500_000)
        )
        planted = replace(
            beside,
            candidate=_all(beside.candidate, kernel_ns),
            baseline_timing=_all(beside.baseline_timing, baseline_ns),
        )
        return replace(found, measurements=(planted,))

    _plant(monkeypatch, slow_down)
    verdict = _tune_for_two(database).verdict

    assert verdict.candidate is not None
    assert verdict.candidate.parts == 1


def _plant(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Build, TimedFinding, int], TimedFinding],
) -> None:
    """Change what each timing finds of a build; the last argument is its place and the process."""
    time_fairly = TrialHost.time_together

    def time_together(
        host: TrialHost,
        builds: Sequence[Build],
        *,
        context: ExecutionContext,
        pairs: int,
        sample_ns: int,
        checks_large_ratios: bool,
        process: int,
        keeps_all: bool,  # noqa: ARG001 - named by the caller
    ) -> tuple[TimedFinding, ...]:
        found = time_fairly(
            host,
            builds,
            context=context,
            pairs=pairs,
            sample_ns=sample_ns,
            checks_large_ratios=checks_large_ratios,
            process=process,
        )
        return tuple(
            change(build, one, place + process)
            for place, (build, one) in enumerate(zip(builds, found, strict=True))
        )

    monkeypatch.setattr(TrialHost, "time_together", time_together)


def _tune_for_two(database: str) -> SweepResult:
    contexts = [ExecutionContext(threads=2)]
    return tune(database, baseline="scalar", budget_s=3.0, contexts=contexts)


@pytest.mark.proof
def test_a_short_call_of_two_threads_is_confirmed_in_several_processes(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_SHORT_CALL_S", inf)  # on a busy machine, no call is short

    _tune_for_two(database)

    of_two = [one for one in confirmations(database) if one.context.threads == 2]
    assert of_two
    assert {len(one.measurement.processes) for one in of_two if one.measurement} == {6}


def _all(timing: Timing, call_ns: int) -> Timing:
    """Return the timing as it would be if each call had taken this long."""
    return replace(timing, samples_ns=(call_ns * timing.calls_per_sample,) * len(timing.samples_ns))


@pytest.mark.disturbed
def test_a_disturbed_sweep_decides_nothing_and_is_not_finished(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_LEAST_S", 0.0)
    monkeypatch.setattr(patience, "_SHARE", 0.0)
    plant_speeds(monkeypatch, repeat(600.0), interference=repeat(DISTURBED))

    disturbed = tune(database).verdict

    assert disturbed.decision is Decision.TIE
    assert disturbed.artifact is None
    assert not disturbed.complete
    assert "in 90% of the rounds threads waited for a core" in (disturbed.doubt or "")
    confirmed = len(confirmations(database))
    plant_speeds(monkeypatch, repeat(2.0))

    calm = tune(database).verdict

    assert len(confirmations(database)) > confirmed
    assert calm.decision is Decision.TUNED
    assert calm.ratio is not None
    assert calm.ratio.median == pytest.approx(2.0)


@pytest.mark.disturbed
def test_a_sweep_waits_for_idle_cores_and_confirms_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_cores = iter([0.1, 1.0])
    monkeypatch.setattr(patience, "idle_cores", lambda: next(idle_cores))
    in_turn = iter([None, DISTURBED, None])  # the race, and two confirmations
    plant_speeds(monkeypatch, iter([2.0, 600.0, 2.0]), interference=in_turn)
    stages: list[str] = []

    verdict = tune(
        database,
        chosen=shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 1),
        on_progress=lambda step: stages.append(step.stage),
    ).verdict

    assert len(confirmations(database)) == 2
    assert stages.count("hot, disturbed, waiting for idle cores") == 2
    assert verdict.decision is Decision.TUNED
    assert verdict.doubt is None


def confirmations(database: str) -> list[Trial]:
    trials = Repository(open_database(database)).trials(only_decisive=True)
    return [trial for trial in trials if trial.stage is Stage.CONFIRM]


def test_all_of_a_final_is_told_whatever_each_process_says(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each process another kernel is slowed, so that each has its own median elsewhere."""
    _plant(monkeypatch, lambda _build, found, turn: _slowed(found, 1 + 0.1 * (turn % 3)))

    result = tune(database, baseline="scalar", budget_s=5.0)

    trials = Repository(open_database(database)).trials()
    finalists = {one.candidate for one in trials if one.stage is Stage.FINAL}
    assert len(finalists) > 1
    assert {one.candidate for one in result.together} == finalists
    assert result.verdict.candidate in finalists


def _slowed(found: TimedFinding, factor: float) -> TimedFinding:
    assert found.measurement is not None
    timing = found.measurement.candidate
    slower = replace(timing, samples_ns=tuple(round(factor * ns) for ns in timing.samples_ns))
    return replace(found, measurements=(replace(found.measurement, candidate=slower),))


def test_a_verdict_rests_on_a_confirmed_trial(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalist that is confirmed first shows less speed: the next one is confirmed too."""
    first, second = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 2)
    plant_speeds(monkeypatch, iter([4.0, 3.0, 4.0, 3.0, 2.8, 3.0]))

    verdict = tune(database, budget_s=600.0, chosen=[first, second]).verdict

    trials = Repository(open_database(database)).trials(only_decisive=True)
    confirmed = [trial for trial in trials if trial.stage is Stage.CONFIRM]
    assert [trial.candidate for trial in confirmed] == [first, second]
    assert verdict.candidate == second
    assert confirmed[1].measurement is not None
    assert verdict.measurement == Evidence.of(confirmed[1].measurement)


@pytest.mark.parametrize(
    ("speeds", "stages"),
    [
        ([4.0, 3.0, 1.5, 2.5, 4.0, 3.0, 4.0], "race race final final final final confirm"),
        ([4.0, 3.0, 1.5, 2.5, 1.5, 2.5, 2.6], "race race final final final final confirm"),
        ([4.0, 3.0, 4.0, 3.5, 2.0, 4.0], "race race final final confirm confirm"),
    ],
    ids=["final", "final twice", "confirmation"],
)
def test_what_was_disturbed_is_timed_once_more_and_then_that_counts(
    database: str, monkeypatch: pytest.MonkeyPatch, speeds: list[float], stages: str
) -> None:
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 2)
    plant_speeds(monkeypatch, iter(speeds))

    measurement = tune(database, budget_s=600.0, chosen=chosen).verdict.measurement

    trials = Repository(open_database(database)).trials()
    timed = [trial.stage.value for trial in trials if trial.measurement is not None]
    assert timed == stages.split()
    assert measurement is not None
    assert measurement.ratio.median == pytest.approx(speeds[-1], rel=1e-3)


def test_of_equally_fast_kernels_the_one_with_fewer_loads_wins(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, few = (
        Candidate.parse(f"scalar_f32_{tile} mc8_nc32_kc16 jc_ic_jr_ir") for tile in ("1x8", "4x2")
    )
    plant_speeds(monkeypatch, iter([2.01, 2.0, 2.01, 2.0, 2.0]))

    verdict = tune(database, budget_s=600.0, chosen=[many, few]).verdict

    assert verdict.candidate == few
