"""What a baseline is."""

from typing import Protocol

from gemm_tuner.bench.workload import Runner, Workload


class Baseline(Protocol):
    """A library that candidates are compared with."""

    @property
    def text(self) -> str:
        """Return the name and version kept in records: `onednn 3.2.0`."""

    @property
    def fuses_epilogue(self) -> bool:
        """Say whether it computes the epilogue, or the product alone."""

    @property
    def most_weight_copies(self) -> int | None:
        """Return over how many copies of the weights its calls can rotate, None for any number."""

    @property
    def is_of_openmp(self) -> bool:
        """Say whether its threads are those of GNU OpenMP."""

    @property
    def preparation_s(self) -> float:
        """Return how long `prepare` may take, in seconds, besides what any call may take."""

    def prepare(self, workload: Workload) -> Runner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the library cannot compute this problem.
        """


class CBaseline:
    """What baselines that are called from a loop in C have in common."""

    most_weight_copies: int | None = None
    is_of_openmp: bool = False
    preparation_s: float = 0.0
