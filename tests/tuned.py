"""One problem, tuned as the command line does."""

from collections.abc import Callable, Sequence

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

PROBLEM = Problem.parse("f32 8x32x16 nk bias+relu")


def tune(
    database: str,
    *,
    baseline: str = "auto",
    budget_s: float = 1.0,
    contexts: Sequence[ExecutionContext] = (ExecutionContext(),),
    chosen: Sequence[Candidate] = (),
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SweepResult:
    """Return the result of a sweep of `PROBLEM` in the first of some contexts."""
    results = sweep(
        PROBLEM,
        contexts=contexts,
        cpu=detect_cpu(),
        repository=Repository(open_database(database)),
        settings=SweepSettings(toolchain=find_toolchain(), budget_s=budget_s, baseline=baseline),
        on_progress=on_progress,
        is_stopped=is_stopped,
        chosen=chosen,
    )
    return results[0]
