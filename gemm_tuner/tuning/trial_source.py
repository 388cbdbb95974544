"""Where a search has its trials from: the machine, or a recording of one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from gemm_tuner.bench.requests import Baselines
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.record import Stage, Trial


class Surroundings(Protocol):
    """The baselines beside which candidates are timed, and how many are proved at once."""

    provers: int

    def baselines(self, regime: Regime) -> Baselines:
        """Return the baselines of a regime."""


class TrialSource(Protocol):
    """Builds, proves and times candidates of one problem."""

    @property
    def host(self) -> Surroundings:
        """Return what they are timed beside."""

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Return the trials of the candidates that failed."""

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Compile the new ones of some candidates, all together."""

    def prove(self, candidates: Sequence[Candidate], context: ExecutionContext) -> list[Candidate]:
        """Return the candidates that compile and compute the right result, in their order."""

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
        """Return the timings of candidates that were proved, in the same rounds."""
