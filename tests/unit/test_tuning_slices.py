"""Slow problems: candidates race on a part, and only whole calls decide."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

import numpy as np
import pytest
from recordings import first_candidates, make_recording
from samples import CPU

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.replay.recorded_trials import Clock, RecordedTrials
from gemm_tuner.replay.samples import Samples
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.table import Plan, make_strategy
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.context_sweep import ContextSweep
from gemm_tuner.tuning.patience import Patience
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.slices import slice_of

WHOLE = Problem.parse("f32 256x64x64 nk none")
PART = Problem.parse("f32 128x64x64 nk none")
CANDIDATES = first_candidates(8, WHOLE)
# The last is the fastest; a slice takes half of a whole call.
WHOLE_NS = {one: 900.0 - 50 * place for place, one in enumerate(CANDIDATES)}
PART_NS = {one: call_ns / 2 for one, call_ns in WHOLE_NS.items()}
BEST = CANDIDATES[-1]


def space_of(text: str) -> Space:
    return Space(problem=Problem.parse(text), cpu=CPU)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("f32 2048x2048x2048 nk bias", "f32 1024x1024x2048 nk bias"),
        ("f32 1..4096x512x4096 nk none", "f32 1..1024x512x4096 nk none"),
        ("f32 8x8x64000000 nk none", None),  # k alone is long
        ("f32 128x768x768 nk none", None),
        ("attention f32 1..4x1..4000000x256 scale", "attention f32 1..4x1..500000x256 scale"),
        (
            "attention f32 1..4x3999999..4000000x256 scale",
            "attention f32 1..4x500000x256 scale",
        ),
    ],
)
def test_a_part_has_fewer_rows_or_columns_and_all_of_k(text: str, part: str | None) -> None:
    found = slice_of(space_of(text))

    assert (found and found.text) == part


class Machine:
    """Whole calls and slices of recorded times, and what was asked of them."""

    def __init__(
        self,
        whole_ns: Mapping[Candidate, float] = WHOLE_NS,
        part_ns: Mapping[Candidate, float] = PART_NS,
        wrong: Sequence[Candidate] = (),
        regime: Regime = Regime.HOT,
    ) -> None:
        self.context = ExecutionContext(regime=regime)
        right = {one: call_ns for one, call_ns in whole_ns.items() if one not in wrong}
        self.clock = Clock()
        self.space, self.whole = self._trials(WHOLE, right, wrong)
        _space, self.part = self._trials(PART, part_ns, ())

    def sweep(
        self,
        *,
        earlier: Sequence[Trial] = (),
        earlier_slices: Sequence[Trial] = (),
        is_stopped: Callable[[], bool] = lambda: False,
        told: Callable[[Progress], None] = lambda _progress: None,
    ) -> tuple[SweepResult, ContextSweep]:
        budget = Budget(seconds=0.001, clock=self.clock)  # spent before anything begins
        sweep = ContextSweep(
            attempts=self.whole,
            slices=self.part,
            earlier=earlier,
            earlier_slices=earlier_slices,
            patience=Patience(budget_s=1.0, threads=1, idle_cores=lambda: 1.0, clock=self.clock),
            on_end=lambda _end: None,
            space=self.space,
            context=self.context,
            whole_budget=budget,
            budget=budget,
            on_progress=told,
            is_stopped=is_stopped,
        )
        strategy = make_strategy(self.space, Plan(name="exhaustive"))
        return sweep.run(strategy, certain=(), is_search=True), sweep

    def _trials(
        self, problem: Problem, call_ns: Mapping[Candidate, float], wrong: Sequence[Candidate]
    ) -> tuple[RecordedSpace, RecordedTrials]:
        recording = make_recording(
            call_ns, problem=problem, failed=wrong, regime=self.context.regime
        )
        space = RecordedSpace.of(recording)
        samples, dice = Samples(recording), np.random.default_rng(0)
        return space, RecordedTrials(recording, samples, space, clock=self.clock, dice=dice)


@pytest.mark.parametrize("regime", Regime)
def test_all_of_a_batch_race_in_slices_whatever_the_budget(regime: Regime) -> None:
    machine = Machine(regime=regime)

    result, sweep = machine.sweep()

    assert machine.part.tried == len(CANDIDATES) == result.tried
    assert result.verdict.candidate == BEST
    assert sweep.ranked() == [*reversed(CANDIDATES)]
    whole = {one for _end, found in machine.whole.timed for one in found}
    assert whole < set(CANDIDATES)
    assert machine.whole.tried == len(whole)


def test_whole_calls_decide_between_finalists() -> None:
    turned = PART_NS | {BEST: PART_NS[CANDIDATES[-2]] + 1}

    result, _sweep = Machine(part_ns=turned).sweep()

    assert result.verdict.candidate == BEST
    assert {trial.problem for trial in result.finalists} == {WHOLE}
    assert {trial.stage for trial in result.finalists} == {Stage.CONFIRM, Stage.FINAL}


def test_what_is_wrong_outside_the_slice_is_replaced_and_never_the_answer() -> None:
    result, sweep = Machine(wrong=[BEST, CANDIDATES[-2]]).sweep()

    assert result.verdict.candidate == CANDIDATES[-3]
    assert result.failed == 2
    assert BEST not in sweep.ranked()


def test_times_of_slices_are_not_told_as_those_of_calls() -> None:
    told: list[Progress] = []

    Machine().sweep(told=told.append)

    searching = [one for one in told if one.stage == "hot, searching"]
    assert searching
    assert {(one.best_ns, one.best_ratio) for one in searching} == {(None, None)}
    assert searching[0].done == len(CANDIDATES)


def test_what_raced_before_is_not_raced_again() -> None:
    first = Machine()
    slices = first.part.time(
        first.part.prove(CANDIDATES, first.context),
        first.context,
        stage=Stage.RACE,
        pairs=5,
        sample_ns=400_000,
    )
    again = Machine()

    result, _sweep = again.sweep(earlier_slices=slices)

    assert again.part.tried == 0
    assert result.tried == len(CANDIDATES)
    assert result.verdict.candidate == BEST


def test_the_best_of_an_earlier_final_is_in_the_next_one() -> None:
    """Its slice is slow, and was not among those that raced now."""
    slow_in_part = PART_NS | {BEST: 2 * max(PART_NS.values())}
    before = Machine()
    confirmed = before.whole.time(
        before.whole.prove([BEST], before.context),
        before.context,
        stage=Stage.CONFIRM,
        pairs=11,
        sample_ns=2_000_000,
    )

    machine = Machine(part_ns=slow_in_part)
    result, _sweep = machine.sweep(earlier=confirmed)

    assert BEST in machine.whole.timed[0][1]
    assert result.verdict.candidate == BEST


def test_stopped_after_a_race_nothing_is_confirmed() -> None:
    asked: Iterator[int] = count()
    machine = Machine()

    result, _sweep = machine.sweep(is_stopped=lambda: next(asked) > 0 and bool(machine.part.timed))

    assert result.is_interrupted
    assert machine.whole.tried == 0
    assert result.verdict.candidate is None
    assert result.tried == len(CANDIDATES)
