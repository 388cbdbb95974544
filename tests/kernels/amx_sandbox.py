"""Programs of AMX instructions with an emulator, in processes that may die."""

from collections.abc import Callable
from multiprocessing.connection import Pipe

import pytest
from amx_programs import Programs, check_amx

from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import build_driver
from gemm_tuner.bench.emulator import Emulator, build_emulator
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.forked import Death, run_in_child
from gemm_tuner.bench.guard import GuardedMatrix
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import CompilationFailed, ToolchainMissing


class Sandbox:
    """Programs by one compiler, and an emulator by the same."""

    def __init__(self, toolchain: Toolchain) -> None:
        self.programs = Programs(toolchain)
        self.emulator = Emulator(build_emulator(toolchain))
        self.report = Report(build_driver("crash", toolchain))

    def run(
        self, task: Callable[[], None], *guarded: GuardedMatrix, has_one_thread: bool = False
    ) -> Finding:
        """Return what becomes of a child that runs a program in its emulator."""

        def child() -> Finding:
            self.emulator.start(self.report, has_one_thread=has_one_thread)
            self.report.watch_regions([region for matrix in guarded for region in matrix.regions])
            task()
            return Finding(outcome=Outcome.CORRECT)

        ours, theirs = Pipe()
        with ours, theirs:
            result = run_in_child(child, report=self.report, stall_timeout_s=20.0, owner=ours)
        if isinstance(result, Death):
            return Finding(outcome=result.outcome, detail=result.detail)
        return result


def open_sandbox(compiler: str) -> Sandbox:
    """Return programs and an emulator by a compiler, or skip the test if it does not know AMX."""
    try:
        toolchain = find_toolchain(compiler)
        check_amx(toolchain)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    except CompilationFailed as failure:
        pytest.skip(f"does not know AMX: {failure}")
    return Sandbox(toolchain)
