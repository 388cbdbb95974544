"""Records: what was tried, under which conditions, and what came of it."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.domain.sandbox import SandboxLevel

_MOST_OF_PEAK = 100.0  # the best instruction does 16 times as much as that of the loop


class Outcome(StrEnum):
    """What came of one trial. A failure is a record like any other."""

    CORRECT = "correct"  # verified; timed if the record has a measurement
    COMPILE_FAILED = "compile_failed"
    LOAD_FAILED = "load_failed"
    CRASHED = "crashed"  # a signal other than an access to a guard page
    HUNG = "hung"
    OUT_OF_BOUNDS = "out_of_bounds"  # touched a guard page or changed padding
    WRONG = "wrong"


class Stage(StrEnum):
    """How carefully a trial was timed."""

    PREDICTED = "predicted"  # not timed: a proof of what the model chose for a CPU not at hand
    RACE = "race"  # a proof, or a few samples that drop what is surely slower
    FINAL = "final"  # many samples of each of the few best
    CONFIRM = "confirm"  # more, of the best of these once again: verdicts rest on them


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What surrounded a measurement and could have changed it.

    `peak_flop_per_s` was measured beside the trial by a loop of independent multiply-adds on one
    core. `noise` is the relative spread of the baseline's samples: interquartile range over median.
    `topology` counts in words what was usable, empty in old records.
    `sandbox` is how far the trial was shut off, None in older records.
    """

    peak_flop_per_s: float
    noise: float
    huge_pages: str
    kernel_release: str
    microcode: str
    topology: str = ""
    sandbox: SandboxLevel | None = None

    def share_of_peak(self, flop: int, call_ns: float, threads: int) -> float | None:
        """Return the speed of a call over that peak, None where what was recorded is no peak."""
        cores_flop_per_s = self.peak_flop_per_s * threads
        share = 1e9 * flop / call_ns / cores_flop_per_s if cores_flop_per_s > 0 else 0.0
        return share if 0 < share < _MOST_OF_PEAK else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEnd:
    """How a sweep ended that nobody stopped: its search was exhausted, or its budget was spent.

    `baseline` names the library that candidates were timed beside, and its version.
    """

    baseline: str
    is_exhausted: bool
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate tried once for one problem, CPU and context. Trials are never changed.

    `generator` identifies the package version and the code that made the source. `refused` is what
    the compiler refused, where there is no artifact. `detail` says in words what went wrong, empty
    when nothing did. `emulated` are features that the CPU lacks and that were emulated for the
    proof: such a trial has no measurement, and no verdict claims a speed because of it. As many
    threads as there are `usable_cpus` could run at the same time; None in old records.
    """

    created_at: datetime
    problem: Problem
    cpu: Cpu
    context: ExecutionContext
    candidate: Candidate
    toolchain: str
    generator: str
    stage: Stage
    outcome: Outcome
    detail: str = ""
    emulated: frozenset[IsaFeature] = frozenset()
    artifact: Artifact | None = None
    refused: Recipe | None = None
    measurement: Measurement | None = None
    conditions: Conditions | None = None
    usable_cpus: int | None = None

    @property
    def had_its_threads(self) -> bool:
        """Return whether each thread had a CPU of its own.

        Records made before this was noted tell the cores alone: then there is one thread for each.
        """
        return self.context.threads <= (self.usable_cpus or self.cpu.physical_cores)

    @property
    def build(self) -> tuple[Candidate, str]:
        """Return the candidate, and the digest of its binary, empty without one."""
        return self.candidate, self.artifact.sha256 if self.artifact else ""

    @property
    def recipe(self) -> Recipe | None:
        """Return what the kernel was compiled from, none in an old record without an artifact."""
        return self.artifact.recipe if self.artifact else self.refused


@dataclass(frozen=True, slots=True)
class AttestedTrial:
    """A trial, and the public measuring key in hex of who attests it; None if nobody does."""

    trial: Trial
    key: str | None
