"""Kernels of ours as baselines: one where no library is, one to show the gain of more threads."""

from pathlib import Path

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.runtime.load import load_kernel

ONE_THREAD = "one-thread"


class ScalarKernel(AnyBaseline):
    """One kernel in portable C++, for machines that have no library to compare with."""

    fuses_epilogue = True

    def __init__(self, build: Build, cpu: Cpu, timer: Path) -> None:
        """Load the kernel.

        Raises:
            KernelRejected: it cannot be loaded.
        """
        self._kernel = load_kernel(build.binary, artifact=build.artifact, cpu=cpu)
        self._timer = timer
        self.text = f"scalar {build.artifact.sha256[:12]}"

    def prepare(self, workload: Workload) -> KernelRunner:
        """Return a runner that works on `workload`."""
        return KernelRunner(self._kernel.native, workload, self._timer)


class OneThread(ScalarKernel):
    """The best stored kernel of one thread, beside one that has several."""

    def __init__(self, build: Build | None, cpu: Cpu, timer: Path) -> None:
        """Load the kernel.

        Raises:
            BaselineMissing: there is none.
            KernelRejected: it cannot be loaded.
        """
        if build is None:
            raise BaselineMissing(
                'no kernel of one thread is stored; run "gemm-tuner sweep" with --threads 1 first.'
            )
        super().__init__(build, cpu, timer)
        self.text = "one-thread"


ROWS = (
    Row(
        name="scalar",
        place=100,
        find=lambda materials: [
            Copy(
                package="gemm-tuner",
                baseline=ScalarKernel(
                    materials.scalar_build(), materials.cpu, materials.drivers.timer
                ),
            )
        ],
        is_last_resort=True,
        one_problem=True,
        takes_activations=True,
        attends=True,
        is_usual=False,
    ),
    Row(
        name=ONE_THREAD,
        place=101,
        find=lambda materials: [
            Copy(
                package="gemm-tuner",
                baseline=OneThread(
                    materials.one_thread_build, materials.cpu, materials.drivers.timer
                ),
            )
        ],
        takes_quantised=True,
        one_problem=True,
        takes_activations=True,
        attends=True,
        is_usual=False,
    ),
)
