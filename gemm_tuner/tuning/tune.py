"""Tune one problem from Python, with no server."""

from dataclasses import dataclass

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.runtime.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.sweep import SweepSettings, sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The verdict on a problem, the trials it rests on, and what to call.

    `kernel` is the winner, or, where the baseline is faster, the same computed by oneDNN, or else
    NumPy, with the reason.
    """

    verdict: Verdict
    finalists: tuple[Trial, ...]
    kernel: Kernel | FallbackKernel


def tune(
    problem: Problem | str,
    *,
    threads: int = 1,
    regime: Regime | str = Regime.HOT,
    budget_s: float = 30.0,
    db_url: str | None = None,
) -> Tuned:
    """Tune a problem on this machine, or recall that it was, and return the kernel to call.

    Args:
        problem: a `Problem`, or its text such as `f32 128x3072x768 nk bias+relu`.
        threads: how many threads will share a call; the kernel then uses as many.
        regime: what is in the caches when it is called, `hot` or `cold_weights`.
        budget_s: the time to spend, in seconds.
        db_url: the database for the records, as an SQLAlchemy URL; None for the user's own.

    Raises:
        InvalidInput: an argument cannot be used.
        MissingCapability: there is no compiler, baseline, kernel family or memory for it.
        StoreFailed: the database cannot be opened.
    """
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    cpu = detect_cpu()
    repository = Repository(open_database(db_url))
    (result,) = sweep(
        asked,
        contexts=[context],
        cpu=cpu,
        repository=repository,
        settings=SweepSettings(budget_s=budget_s, toolchain=find_toolchain()),
        on_progress=lambda _progress: None,
        is_stopped=lambda: False,
    )
    artifact = result.verdict.artifact
    binary = repository.binary(artifact.sha256) if artifact else None
    kernel = (
        load_kernel(binary, artifact=artifact, cpu=cpu, threads=threads)
        if artifact and binary
        else FallbackKernel(problem=asked, reason=_reason(result.verdict), threads=threads)
    )
    return Tuned(verdict=result.verdict, finalists=result.finalists, kernel=kernel)


def _reason(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return f"no candidate for {verdict.problem.text!r} was timed; give it more time."
    return (
        "no kernel is shown to be as fast as the baseline: the best for "
        f"{verdict.problem.text!r} has {verdict.ratio.median:.3f} times its speed."
    )
