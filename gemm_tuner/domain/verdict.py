"""The answer to "which kernel should run this problem here?"."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.problem import Problem

TUNED_ABOVE = 1.02
# What the threads of a call may lose by waiting for each other another time (decision 60).
_THREADS_WAIT_NS = 1000.0
BASELINE_BELOW = 0.98


class Decision(StrEnum):
    """Which is faster, the kernel or its baseline, the fastest library.

    A kernel is served where it is as fast as what runs instead: another library, perhaps. One with
    a fixed order of additions always is, since no library has that order.
    """

    TUNED = "tuned"  # the kernel is faster than the baseline
    TIE = "tie"  # neither is shown to be faster
    BASELINE = "baseline"  # the baseline is faster, or nothing was measured


class Basis(StrEnum):
    """What a verdict rests on."""

    MEASURED = "measured"  # this problem on this CPU
    SIBLING = "sibling"  # this problem on the same micro-architecture class
    BUCKET = "bucket"  # a kernel tuned for a range of m that holds this m
    SAME_MODEL = "same_model"  # this problem on the same CPU model with more features
    SHARED = "shared"  # this problem on this CPU, of the kernels that share packed weights
    PREDICTED = "predicted"  # proved, and the first choice of the model for such a core; not timed
    NONE = "none"  # nothing known

    @property
    def text(self) -> str:
        """Return it in words, as reports say it."""
        return _BASIS_TEXTS[self]


_BASIS_TEXTS = {
    Basis.MEASURED: "measured on this CPU",
    Basis.SIBLING: "measured on a CPU of the same class",
    Basis.BUCKET: "by a kernel for a range of rows",
    Basis.SAME_MODEL: "measured on this CPU model with more features",
    Basis.SHARED: "measured on this CPU among kernels that share packed weights",
    Basis.PREDICTED: "predicted, and not timed",
    Basis.NONE: "of which nothing is known",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigure:
    """What one host decides of a kernel by what it measured itself, and whether it would serve it.

    `key` is the public measuring key of the host in hex, `kernel` the sha256 of the binary, and
    `candidate` its text. Speeds are over that of `baseline`.
    """

    key: str
    kernel: str
    candidate: str
    decision: Decision
    would_serve: bool
    ratio: Ratio
    baseline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A decision for one problem, CPU and context, with the kernel it names and why.

    `complete` is false when the sweep behind it was stopped by its budget or by the user.
    `generator` rendered the kernel, and `tried_at` is when the trial was that the verdict rests on.
    `attested_by` is the id of the measuring key that attests the artifact. So many hosts as the
    `quorum` says must find the same by themselves before a kernel is named; `hosts` tells what each
    found, empty where one measured and one is enough.
    """

    problem: Problem
    cpu_key: str
    context: ExecutionContext
    decision: Decision
    basis: Basis
    complete: bool
    candidate: Candidate | None = None
    artifact: Artifact | None = None
    measurement: Evidence | None = None
    generator: str | None = None
    tried_at: datetime | None = None
    attested_by: str | None = None
    quorum: int = 1
    hosts: tuple[HostFigure, ...] = ()

    @property
    def ratio(self) -> Ratio | None:
        """Return the speed of the kernel over that of the baseline, if measured."""
        return self.measurement.ratio if self.measurement else None

    @property
    def comparison(self) -> Comparison | None:
        """Return the speed beside the baseline and beside what runs instead, if measured."""
        measured = self.measurement
        return (
            Comparison.of(
                measured.ratio,
                measured.baseline,
                measured.raced,
                is_fixed=self.problem.is_fixed,
            )
            if measured
            else None
        )

    @property
    def is_lead_of_waiting(self) -> bool:
        """Return whether a faster kernel is a tie, since its threads may wait longer next time."""
        measured = self.measurement
        return (
            self.decision is Decision.TIE
            and measured is not None
            and self.candidate is not None
            and decide(measured.ratio) is Decision.TUNED
            and not is_faster_whatever_threads_wait(
                self.candidate.threads_used(self.context.threads),
                kernel_ns=measured.candidate_median_ns,
                baseline_ns=measured.baseline_median_ns,
            )
        )

    @property
    def is_withheld(self) -> bool:
        """Return whether a kernel that a host would serve is not named, as too few others do."""
        return self.quorum > 1 and self.artifact is None and any(h.would_serve for h in self.hosts)

    @property
    def doubt(self) -> str | None:
        """Return why the measurement decides nothing, None if it does, or if there is none."""
        return self.measurement.doubt if self.measurement else None


def decide(ratio: Ratio) -> Decision:
    """Return the claim that a ratio to the baseline allows.

    `tuned` needs the whole interval above 1.02 and the fastest samples to agree; `baseline` needs
    the interval below 0.98; all else is a `tie`.
    """
    if ratio.low > TUNED_ABOVE and ratio.of_minimums > TUNED_ABOVE:
        return Decision.TUNED
    if ratio.high < BASELINE_BELOW:
        return Decision.BASELINE
    return Decision.TIE


def is_faster_whatever_threads_wait(threads: int, *, kernel_ns: float, baseline_ns: float) -> bool:
    """Return whether a call on so many threads stays faster if they wait as long as they may."""
    return threads == 1 or TUNED_ABOVE * (kernel_ns + _THREADS_WAIT_NS) < baseline_ns
