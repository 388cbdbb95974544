"""What several kernels for a range of m were measured at: the time over m, and what it loses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.select.shared_weights import loss_beside
from gemm_tuner.store.repository import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """A library for a range of m at one m, timed in the same rounds as the kernel for it alone."""

    rows: int
    alone: Trial
    alone_timed: Measurement
    timed: Measurement

    @property
    def loss(self) -> float:
        """Return the share of its speed that the kernel for this m alone loses."""
        return loss_beside(self.alone_timed.ratio, self.timed.ratio)

    @property
    def is_doubted(self) -> bool:
        """Say whether there is reason to doubt one of the two times."""
        return any(why_doubted(one) is not None for one in (self.alone_timed, self.timed))


def measured_range(
    repository: Repository, artifact: str, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> tuple[MeasuredRows, ...]:
    """Return the m at which the library for a range was measured on a CPU, in order.

    Args:
        repository: the store.
        artifact: the sha256 of the library.
        problem: its problem, for a range of m.
        cpu: where it was measured.
        context: the threads and the regime.
    """
    found = [
        measured_at(repository, artifact, one, cpu=cpu, context=context)
        for one in repository.exact_of(problem)
    ]
    return tuple(sorted((one for one in found if one), key=lambda one: one.rows))


def measured_at(
    repository: Repository, artifact: str, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> MeasuredRows | None:
    """Return the newest measurement of a library at the one m of a problem, None without any."""
    timed = [
        (trial, trial.measurement)
        for trial in repository.trials(problem=problem, cpu_key=cpu.exact_key)
        if trial.outcome is Outcome.CORRECT and trial.context == context and trial.measurement
    ]
    for place, (trial, measurement) in reversed([*enumerate(timed)]):
        if trial.artifact and trial.artifact.sha256 == artifact:
            beside = _last_in_rounds_of(measurement, timed[:place])
            if beside is not None:
                return MeasuredRows(
                    rows=problem.m.high, alone=beside[0], alone_timed=beside[1], timed=measurement
                )
    return None


def at_rows(problem: Problem, rows: int) -> Problem:
    """Return a problem for exactly this many rows."""
    return replace(problem, m=Rows(low=rows, high=rows))


def mean_loss(measured: Sequence[MeasuredRows]) -> float:
    """Return the mean of the losses."""
    return sum(one.loss for one in measured) / len(measured)


def _last_in_rounds_of(
    measurement: Measurement, timed: Sequence[tuple[Trial, Measurement]]
) -> tuple[Trial, Measurement] | None:
    """Return the kernel for one m alone that was timed last before, in the same rounds."""
    samples = measurement.baseline_timing.samples_ns
    for trial, other in reversed(timed):
        others = other.baseline_timing.samples_ns
        count = min(len(samples), len(others))
        if not trial.candidate.below and samples[:count] == others[:count]:
            return trial, other
    return None
