"""Times that tests plant in place of those that a busy machine would give."""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import pytest

from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.requests import Baselines
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Interference, Measurement, Timing
from gemm_tuner.domain.record import Outcome

_BASELINE_NS = 10_000
# One that has less of the speed of the fastest takes part in the first round only.
_BEHIND, _FEW = 0.8, 1


def plant_speeds(
    monkeypatch: pytest.MonkeyPatch,
    speeds: Iterator[float],
    interference: Iterator[Interference | None] | None = None,
) -> None:
    """Let each timing of a candidate find the next of `speeds`, over that of the baseline.

    With it comes the next of what other work took from it; nothing unless some is given. Other
    processes that time the same find the same speed.
    """
    plant_speeds_of(monkeypatch, lambda _build: next(speeds), interference)


def plant_speeds_of(
    monkeypatch: pytest.MonkeyPatch,
    speed: Callable[[Build], float],
    interference: Iterator[Interference | None] | None = None,
) -> None:
    """Let timings find what `plant_speeds` does, where the speed is that of a build."""
    in_first: tuple[TimedFinding, ...] = ()
    taken = repeat(None) if interference is None else interference

    def time_together(
        host: TrialHost,
        builds: Sequence[Build],
        *,
        context: ExecutionContext,
        pairs: int,
        sample_ns: int,  # noqa: ARG001 - named by the caller
        checks_large_ratios: bool,  # noqa: ARG001 - named by the caller
        process: int,
        keeps_all: bool,
    ) -> tuple[TimedFinding, ...]:
        nonlocal in_first
        if process == 0:
            beside = host.baselines(context.regime)
            speeds = [speed(build) for build in builds]
            in_first = tuple(
                _timed(beside, one, pairs if keeps_all or stays else few, next(taken))
                for one in speeds
                for stays, few in [(one > _BEHIND * max(speeds), min(_FEW, pairs))]
            )
        return in_first

    monkeypatch.setattr(TrialHost, "time_together", time_together)


def _timed(
    beside: Baselines, speed: float, pairs: int, interference: Interference | None
) -> TimedFinding:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(round(_BASELINE_NS / speed),) * pairs),
        baseline=beside.text,
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(_BASELINE_NS,) * pairs),
        interference=interference,
        raced=beside.raced,
    )
    return TimedFinding(finding=Finding(outcome=Outcome.CORRECT), measurements=(measurement,))
