"""What a baseline is."""

from typing import Protocol

from gemm_tuner.bench.workload import Callee, Workload


class Baseline(Protocol):
    """A library that candidates are compared with."""

    @property
    def text(self) -> str:
        """Return the name and version kept in records: `onednn 3.2.0`."""

    @property
    def fuses_epilogue(self) -> bool:
        """Say whether it computes the epilogue, or the product alone."""

    def prepare(self, workload: Workload) -> Callee:
        """Return a callee that works on `workload`.

        Raises:
            BaselineMissing: the library cannot compute this problem.
        """
