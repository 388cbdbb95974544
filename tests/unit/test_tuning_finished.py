"""Which verdicts of a finished sweep are final."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_disturbed_trial, make_trial

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.measurement import Measurement, Timing, of_several_processes
from gemm_tuner.domain.record import SweepEnd, Trial
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.strategies.table import Plan
from gemm_tuner.tuning.finished import is_settled, recall_finished
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.settings import SweepSettings

PAIRS = 20


def _timed(*speeds: float) -> Trial:
    """Return a confirming trial whose rounds have these speeds over the baseline, in turn."""
    calls_ns = [round(100_000 / speeds[pair % len(speeds)]) for pair in range(PAIRS)]
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=tuple(calls_ns)),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(100_000,) * PAIRS),
    )
    return replace(make_trial(), measurement=measurement)


def _in_processes(*speeds: float) -> Trial:
    """Return a confirming trial that has one of these speeds in each process."""
    measured = [_timed(speed).measurement for speed in speeds]
    _middle, (together,) = of_several_processes([[one] for one in measured if one])
    return replace(make_trial(), measurement=together)


@pytest.mark.parametrize(
    ("trial", "settled"),
    [
        (_timed(1.0), True),
        (_timed(0.99, 1.0, 1.01), True),
        (_timed(0.8, 1.0, 1.2), False),
        (_timed(0.7, 0.9), False),
        (_timed(0.5), True),
        (_timed(1.3, 1.5, 1.7), True),  # tuned, however wide
        # the fastest sample of the kernel says 1.15 times, the interval 1.00
        (_timed(*(1.0,) * 19, 1.15), False),
        (make_disturbed_trial(), False),
        (_in_processes(0.93, 1.24), True),  # a tie: the processes differ, and each is sure
    ],
)
def test_a_tie_is_settled_when_its_interval_is_narrow_and_the_minimums_agree(
    trial: Trial, *, settled: bool
) -> None:
    verdict = derive_verdict(
        [trial], problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )

    assert is_settled(verdict) is settled


@pytest.mark.parametrize(
    ("strategy", "baseline", "is_recalled"),
    [
        ("local", "onednn", True),
        ("local", "onednn 3.2.0", True),
        ("local", "onednn 3.2", False),
        ("local", "one", False),
        ("random", "onednn", False),
    ],
)
def test_an_end_is_of_the_default_search_beside_one_baseline(
    strategy: str,
    baseline: str,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_recalled: bool,
) -> None:
    trial = replace(make_trial(), generator=generator_version())
    repository.add_trial(trial)
    repository.mark_ended(
        PROBLEM,
        CPU.exact_key,
        CONTEXT,
        toolchain=trial.toolchain,
        generator=trial.generator,
        end=SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=30.0),
    )
    monkeypatch.setattr("gemm_tuner.tuning.earlier.stands", lambda _trial, _toolchain: True)
    name, version, *_flags = trial.toolchain.split()
    settings = SweepSettings(
        toolchain=Toolchain(name=name, version=f"{version} -O3", command=("gcc",)),
        plan=Plan(name=strategy),
    )

    found = recall_finished(
        Space(problem=PROBLEM, cpu=CPU), {CONTEXT: baseline}, repository, settings
    )

    assert (CONTEXT in found) is is_recalled
