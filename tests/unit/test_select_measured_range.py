"""The time over m of a library for a range, read from what was timed."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, add_build, make_artifact, make_trial

from gemm_tuner.cli.reports.range_report import print_curve
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Interference, Measurement, Timing
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.select.measured_range import at_rows, mean_loss, measured_range
from gemm_tuner.store.repository import Repository

ALONE = make_trial().candidate
SEVERAL = Candidate.parse(f"..9 {ALONE.text} | {ALONE.text}")
LIBRARY = b"\x7fELF library"
RANGE = replace(PROBLEM, m=Rows(low=1, high=128))


def _timed(
    m: int,
    candidate: Candidate,
    call_ns: int,
    *,
    minute: int,
    rounds: int,
    interference: Interference | None = None,
) -> Trial:
    """Return a trial at an m, in rounds that their times of the baseline tell from others."""
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(call_ns,) * 12),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(1000 + rounds,) * 12),
        interference=interference,
    )
    return make_trial(
        problem=at_rows(PROBLEM, m),
        candidate=candidate,
        stage=Stage.FINAL,
        minute=minute,
        measurement=measurement,
        artifact=make_artifact(LIBRARY) if candidate.below else make_artifact(),
    )


@pytest.fixture
def repository_with_a_curve(repository: Repository) -> Repository:
    add_build(repository)
    add_build(repository, LIBRARY)
    for trial in (
        _timed(16, ALONE, 400, minute=0, rounds=0),
        _timed(16, SEVERAL, 800, minute=0, rounds=0),
        _timed(4, ALONE, 100, minute=1, rounds=1),  # in other rounds
        _timed(4, ALONE, 190, minute=2, rounds=2),
        _timed(4, SEVERAL, 200, minute=2, rounds=2),
        _timed(16, ALONE, 400, minute=3, rounds=3),
        _timed(16, SEVERAL, 440, minute=3, rounds=3),
        _timed(64, ALONE, 400, minute=4, rounds=4),
    ):
        repository.add_trial(trial)
    return repository


def test_each_m_has_its_newest_times_of_the_same_rounds(
    repository_with_a_curve: Repository,
) -> None:
    measured = measured_range(
        repository_with_a_curve,
        make_artifact(LIBRARY).sha256,
        RANGE,
        cpu=CPU,
        context=CONTEXT,
    )

    assert [one.rows for one in measured] == [4, 16]
    assert [one.alone_timed.candidate.median_ns for one in measured] == [190, 400]
    assert [one.loss for one in measured] == pytest.approx([1 - 190 / 200, 1 - 400 / 440])
    assert mean_loss(measured) == pytest.approx((0.05 + 1 / 11) / 2)


@pytest.mark.parametrize(
    ("binary", "context"), [(b"other", CONTEXT), (LIBRARY, ExecutionContext(threads=2))]
)
def test_another_library_or_context_has_no_curve(
    binary: bytes, context: ExecutionContext, repository_with_a_curve: Repository
) -> None:
    sha256 = make_artifact(binary).sha256

    assert not measured_range(repository_with_a_curve, sha256, RANGE, cpu=CPU, context=context)


def test_times_that_other_work_disturbed_are_doubted(
    repository_with_a_curve: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)
    for candidate in (ALONE, SEVERAL):
        repository_with_a_curve.add_trial(
            _timed(4, candidate, 100, minute=5, rounds=5, interference=busy)
        )

    measured = measured_range(
        repository_with_a_curve, make_artifact(LIBRARY).sha256, RANGE, cpu=CPU, context=CONTEXT
    )
    print_curve(RANGE, measured)

    assert [one.is_doubted for one in measured] == [True, False]
    assert "other work disturbed the times at m = 4;" in capsys.readouterr().out


def test_it_is_said_where_the_baseline_is_faster(
    repository_with_a_curve: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    for candidate in (ALONE, SEVERAL):
        repository_with_a_curve.add_trial(_timed(16, candidate, 1100, minute=5, rounds=5))

    measured = measured_range(
        repository_with_a_curve, make_artifact(LIBRARY).sha256, RANGE, cpu=CPU, context=CONTEXT
    )
    print_curve(RANGE, measured)

    assert "slower than the baseline at m = 16; only" in capsys.readouterr().out
