"""A sweep that was cut off after its final goes on from there; any other times its finalists."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pytest
from recordings import PROBLEM, first_candidates, make_recording

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Interference, Measurement
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.replay.recorded_trials import Clock, RecordedTrials
from gemm_tuner.replay.samples import Samples
from gemm_tuner.strategies.table import Plan, make_strategy
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.context_sweep import ContextSweep
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.patience import Patience
from gemm_tuner.tuning.result import SweepResult

CANDIDATES = first_candidates(6, PROBLEM)
CALL_NS = {one: 900.0 - 50 * place for place, one in enumerate(CANDIDATES)}
BEST = CANDIDATES[-1]
CONTEXT = ExecutionContext()


class CutOffError(Exception):
    """The worker was lost."""


class Machine(RecordedTrials):
    """Recorded trials; what was timed is kept, and after some timings it `is_lost`."""

    def __init__(
        self,
        call_ns: dict[Candidate, float] = CALL_NS,
        is_lost: Callable[[Stage], bool] = lambda _stage: False,
    ) -> None:
        recording = make_recording(call_ns)
        self.space = RecordedSpace.of(recording)
        self.clock = Clock()
        self.kept: list[Trial] = []
        self.stages: list[Stage] = []
        self._is_lost = is_lost
        samples, dice = Samples(recording), np.random.default_rng(0)
        super().__init__(recording, samples, self.space, clock=self.clock, dice=dice)

    def time(
        self,
        candidates: Sequence[Candidate],
        context: ExecutionContext,
        *,
        stage: Stage,
        pairs: int,
        sample_ns: int,
        processes: int = 1,
        on_process: Callable[[int], None] = lambda _process: None,
    ) -> list[Trial]:
        found = super().time(
            candidates,
            context,
            stage=stage,
            pairs=pairs,
            sample_ns=sample_ns,
            processes=processes,
            on_process=on_process,
        )
        found = [replace(one, generator=generator_version()) for one in found]
        self.kept += found
        self.stages.append(stage)
        if self._is_lost(stage):
            raise CutOffError
        return found

    def sweep(
        self,
        earlier: Sequence[Trial] = (),
        *,
        since: datetime | None = None,
        again: bool = False,
    ) -> SweepResult:
        budget = Budget(seconds=60.0, clock=self.clock)
        sweep = ContextSweep(
            attempts=self,
            earlier=earlier,
            patience=Patience(budget_s=1.0, threads=1, idle_cores=lambda: 1.0, clock=self.clock),
            on_end=lambda _end: None,
            space=self.space,
            context=CONTEXT,
            whole_budget=budget,
            budget=budget,
            on_progress=lambda _progress: None,
            is_stopped=lambda: False,
            since=since,
            again=again,
        )
        strategy = make_strategy(self.space, Plan(name="exhaustive"))
        return sweep.run(strategy, certain=(), is_search=True)


def lost_after(stage: Stage, call_ns: dict[Candidate, float] = CALL_NS) -> list[Trial]:
    """Return what a sweep kept that was cut off after it had timed something in this stage."""
    machine = Machine(call_ns, lambda timed: timed is stage)
    with pytest.raises(CutOffError):
        machine.sweep()
    return machine.kept


def began(kept: Sequence[Trial]) -> datetime:
    return min(one.created_at for one in kept)


def test_a_sweep_cut_off_after_its_final_only_confirms() -> None:
    kept = lost_after(Stage.FINAL)
    machine = Machine()

    result = machine.sweep(kept, since=began(kept))

    assert machine.stages == [Stage.CONFIRM]
    assert result.verdict.candidate == BEST


def test_the_search_was_over_when_the_final_began() -> None:
    """What is timed now would not be in it, though it may have taken less in its race."""
    kept = lost_after(Stage.FINAL)
    late = first_candidates(7, PROBLEM)[-1]
    machine = Machine(CALL_NS | {late: 100.0})

    result = machine.sweep(kept, since=began(kept))

    assert machine.stages == [Stage.CONFIRM]
    assert result.verdict.candidate == BEST


def test_a_sweep_cut_off_after_it_confirmed_times_nothing() -> None:
    kept = lost_after(Stage.CONFIRM)
    machine = Machine()

    result = machine.sweep(kept, since=began(kept))

    assert machine.stages == []
    assert result.verdict.candidate == BEST


def test_a_single_candidate_that_was_confirmed_needs_no_final() -> None:
    only = {BEST: 600.0}
    kept = lost_after(Stage.CONFIRM, only)
    machine = Machine(only)

    result = machine.sweep(kept, since=began(kept))

    assert machine.stages == []
    assert result.verdict.candidate == BEST


@pytest.mark.parametrize(
    "of_another_sweep",
    [
        lambda machine, kept: machine.sweep(kept),
        lambda machine, kept: machine.sweep(kept, since=began(kept) + timedelta(days=999)),
        lambda machine, kept: machine.sweep(kept, since=began(kept), again=True),
    ],
)
def test_a_final_of_another_sweep_is_timed_again(
    of_another_sweep: Callable[[Machine, Sequence[Trial]], SweepResult],
) -> None:
    machine = Machine()

    result = of_another_sweep(machine, lost_after(Stage.FINAL))

    assert machine.stages[-2:] == [Stage.FINAL, Stage.CONFIRM]
    assert result.verdict.candidate == BEST


def disturbed(trial: Trial) -> Trial:
    """Return a trial as if other work had kept threads from their cores."""
    assert isinstance(trial.measurement, Measurement)
    interference = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)
    return replace(trial, measurement=replace(trial.measurement, interference=interference))


@pytest.mark.parametrize(
    ("stage", "timed"),
    [(Stage.FINAL, [Stage.FINAL, Stage.CONFIRM]), (Stage.CONFIRM, [Stage.CONFIRM])],
)
def test_what_was_disturbed_is_timed_again(stage: Stage, timed: list[Stage]) -> None:
    kept = [disturbed(one) if one.stage is stage else one for one in lost_after(stage)]
    machine = Machine()

    result = machine.sweep(kept, since=began(kept))

    assert [one for one in machine.stages if one is not Stage.RACE] == timed
    assert result.verdict.candidate == BEST
