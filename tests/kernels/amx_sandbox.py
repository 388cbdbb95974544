"""Programs of AMX instructions with an emulator, in processes that may die."""

from collections.abc import Callable
from multiprocessing.connection import Pipe

import pytest
from amx_programs import Programs, check_amx
from needs import need_compiler

from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import build_driver
from gemm_tuner.bench.emulator import Emulator, build_emulator
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.forked import Death, run_in_child
from gemm_tuner.bench.guard import GuardedMatrix
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import CompilationFailed


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
    toolchain = need_compiler(compiler)
    try:
        check_amx(toolchain)
    except CompilationFailed:
        pytest.skip(f"{toolchain.text} does not know AMX")
    return Sandbox(toolchain)
