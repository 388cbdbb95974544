"""Tune one problem, or a layer for several m, from Python, with no server."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.layer_problems import MAX_LOSS, layer_problems
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.measuring_lock import measuring
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import Sharing
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.progress import Progress, ProgressLog, waiting
from gemm_tuner.tuning.ranges.split_range import split_range as split_one_range
from gemm_tuner.tuning.ranges.wide_range import tune_rows
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.stored import kernel_or_none
from gemm_tuner.tuning.sweep import sweep
from gemm_tuner.tuning.sweep_shared import split_budget, sweep_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The verdict on a problem, the trials it rests on, and what to call.

    `kernel` is the winner, or, where the baseline is faster, the same computed by that library, or
    by the best that can be called here, with the reason.
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
    again: bool = False,
    db_url: str | None = None,
    split_range: bool = False,
    is_quiet: bool = False,
) -> Tuned:
    """Tune a problem on this machine, or recall that it was, and return the kernel to call.

    While it tunes, a line on stderr, or in the log of the program, says now and then how far it is.

    With `split_range`, a problem for a range of m such as `f32 1..512x3072x768` gets one library of
    a few kernels, which read one packed copy of the weights.

    Args:
        problem: a `Problem`, or its text such as `f32 128x3072x768 nk bias+relu`.
        threads: how many threads will share a call; the kernel then uses as many.
        regime: the state of the caches when it is called, `hot` or `cold_weights`.
        budget_s: the time to spend, in seconds; of a split range, on each m that is measured.
        again: measure anew what was tuned before.
        db_url: the database for the records, as an SQLAlchemy URL; None for the user's own.
        split_range: whether to tune a range of m as several kernels.
        is_quiet: whether to say nothing while it tunes.

    Raises:
        InvalidInput: an argument cannot be used.
        MissingCapability: there is no compiler, baseline, kernel family or memory for it, or not
            as many CPUs as threads.
        StoreFailed: the database cannot be opened.
    """
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    cpu = detect_cpu()
    repository = Repository(open_database(db_url))
    settings = SweepSettings(budget_s=budget_s, toolchain=find_toolchain(), again=again)
    on_progress = partial(_shower(is_quiet=is_quiet), asked)
    if split_range:
        with measuring(on_wait=lambda text: on_progress(waiting(text))):
            split = split_one_range(
                asked,
                context=context,
                cpu=cpu,
                repository=repository,
                settings=settings,
                on_progress=on_progress,
                is_stopped=lambda: False,
            )
        verdict = choose(repository, asked, cpu=cpu, context=context).verdict
        finalists: tuple[Trial, ...] = (split.trial,)
    else:
        (result,) = sweep(
            asked,
            contexts=[context],
            cpu=cpu,
            repository=repository,
            settings=settings,
            on_progress=on_progress,
            is_stopped=lambda: False,
        )
        verdict, finalists = result.verdict, result.finalists
    found = kernel_or_none(verdict, repository, cpu, threads)
    kernel = found if isinstance(found, Kernel) else found.fallback(asked, threads=threads)
    return Tuned(verdict=verdict, finalists=finalists, kernel=kernel)


def _shower(*, is_quiet: bool) -> Callable[[Problem, Progress], None]:
    """Return what tells of the steps of problems."""
    return (lambda _problem, _step: None) if is_quiet else ProgressLog().show


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLayer:
    """The kernel of each m, in the order asked for, with its reasons, and the layer to call."""

    sharing: Sharing
    layer: Layer


def tune_layer(
    n: int,
    k: int,
    *,
    m: Iterable[int | str],
    dtype: str = "f32",
    epilogue: str = "none",
    w_layout: str = "nk",
    reduction: str = "any",
    threads: int = 1,
    regime: Regime | str = Regime.HOT,
    max_loss: float = MAX_LOSS,
    budget_s: float = 30.0,
    again: bool = False,
    db_url: str | None = None,
    is_quiet: bool = False,
) -> TunedLayer:
    """Tune a layer for several m, so that its kernels read as few packed copies as they can.

    Args:
        n: columns of y.
        k: columns of x.
        m: the numbers of rows, or ranges such as `"17..64"`. Others are made up of these. A range
            whose greatest m is more than four times its least is tuned as several kernels.
        dtype: types such as `f32` or `bf16_bf16_f32_f32`.
        epilogue: steps such as `bias+gelu_erf`.
        w_layout: `nk` or `kn`, with groups `nk:g128`.
        reduction: `any`, or `fixed` for the same bits from every kernel.
        threads: how many threads will share a call.
        regime: the state of the caches when it is called, `hot` or `cold_weights`.
        max_loss: the share of its speed that each m may lose so that weights are shared.
        budget_s: the time to spend on each m, in seconds; of a range that becomes several kernels,
            on each m that is measured.
        again: measure anew what was tuned before.
        db_url: the database for the records, as an SQLAlchemy URL; None for the user's own.
        is_quiet: whether to say nothing while it tunes.

    Raises:
        GemmTunerError: as in `tune`.
    """
    problems = layer_problems(
        n,
        k,
        m=m,
        dtype=dtype,
        epilogue=epilogue,
        w_layout=w_layout,
        reduction=reduction,
        max_loss=max_loss,
    )
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    cpu = detect_cpu()
    repository = Repository(open_database(db_url))
    own_settings, shared_settings = split_budget(
        SweepSettings(budget_s=budget_s, toolchain=find_toolchain(), again=again)
    )
    show = _shower(is_quiet=is_quiet)
    for problem in problems:
        tune_rows(
            problem,
            context=context,
            cpu=cpu,
            repository=repository,
            settings=own_settings,
            on_progress=partial(show, problem),
        )
    sharing = sweep_shared(
        problems,
        context=context,
        cpu=cpu,
        repository=repository,
        settings=shared_settings,
        max_loss=max_loss,
        on_progress=partial(show, problems[0]),
        is_stopped=lambda: False,
    )
    found = [
        kernel_or_none(one.chosen.verdict, repository, cpu, threads) for one in sharing.kernels
    ]
    return TunedLayer(sharing=sharing, layer=make_layer(problems, found, threads=threads))
