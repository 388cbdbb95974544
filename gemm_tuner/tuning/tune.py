"""Tune one problem from Python, with no server."""

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.sweep import SweepResult, SweepSettings, sweep


def tune(
    problem: Problem | str,
    *,
    threads: int = 1,
    regime: str = "hot",
    budget_s: float = 30.0,
    db_url: str | None = None,
) -> SweepResult:
    """Tune a problem on this machine and return the verdict with the finalists.

    Args:
        problem: a `Problem`, or its text such as `f32 128x3072x768 nk bias+relu`.
        threads: how many threads will call the kernel.
        regime: `hot` or `cold_weights`.
        budget_s: the time to spend, in seconds.
        db_url: the database for the records, as an SQLAlchemy URL; None for the user's own.

    Raises:
        InvalidInput: an argument cannot be used.
        MissingCapability: there is no compiler, baseline, kernel family or memory for it.
        StoreFailed: the database cannot be opened.
    """
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    (result,) = sweep(
        asked,
        contexts=[ExecutionContext(threads=threads, regime=Regime.parse_choice(regime)[0])],
        cpu=detect_cpu(),
        repository=Repository(open_database(db_url)),
        settings=SweepSettings(budget_s=budget_s, toolchain=find_toolchain()),
        on_progress=lambda _progress: None,
        is_stopped=lambda: False,
    )
    return result
