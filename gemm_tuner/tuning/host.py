"""Starting the server in which a sweep proves and times its kernels."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.errors import BaselineMissing, NotEnoughMemory, TrialFailed
from gemm_tuner.libraries.plain import plain_problem
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.strategies.strategy import BATCH
from gemm_tuner.tuning.attempt import build_candidate
from gemm_tuner.tuning.settings import SweepSettings

logger = logging.getLogger(__name__)

_SEED = 0


def start_host(
    problem: Problem,
    space: Space,
    settings: SweepSettings,
    *,
    provers: int = 1,
    races: Sequence[Race] = (Race(),),
    is_stopped: Callable[[], bool] = lambda: False,
) -> TrialHost:
    """Return a server for the trials of a problem, beside the baseline of `settings`.

    Up to `provers` builds can be verified at the same time. The `races` decide which
    baseline `auto` is in each regime that is timed.

    Raises:
        PreparationStopped: it `is_stopped` before it is ready.
    """
    return TrialHost(
        problem,
        threads=space.threads,
        baseline=settings.baseline,
        toolchain=settings.toolchain,
        seed=_SEED,
        scalar_build=partial(_build_scalar, problem, space, settings),
        provers=provers,
        races=races,
        is_stopped=is_stopped,
    )


def start_slice_host(
    space: Space,
    host: TrialHost,
    settings: SweepSettings,
    races: Sequence[Race],
    is_stopped: Callable[[], bool],
) -> TrialHost | None:
    """Return a server for a slice of the problem of `host`, beside the same library.

    None where the slice cannot be timed beside `host`.

    Raises:
        PreparationStopped: it `is_stopped` before it is ready, where the settings heed that.
    """
    try:
        return start_host(
            space.problem,
            space,
            settings,
            provers=host.provers,
            races=[replace(race, earlier=host.baselines(race.regime).raced) for race in races],
            is_stopped=lambda: settings.stops_preparing and is_stopped(),
        )
    except (BaselineMissing, NotEnoughMemory, TrialFailed) as failure:
        library = host.baselines(races[0].regime).text
        logger.info("%s is not timed in slices: %s", library, failure)
        return None


def start_host_while_compiling(
    space: Space,
    first: Sequence[Candidate],
    settings: SweepSettings,
    races: Sequence[Race],
    is_stopped: Callable[[], bool],
    *,
    for_problem: Problem,
) -> TrialHost:
    """Return a server; while it prepares, the first candidates are compiled into the cache.

    They are compiled `for_problem`, which is a slice where candidates race on one.
    When it is ready, no more of that begins: what the sweep needs at once goes first.

    Raises:
        PreparationStopped: it `is_stopped` before it is ready, where the settings heed that.
    """
    cpus = usable_cpus()
    executor = ThreadPoolExecutor(max_workers=max(1, cpus - 1))  # the server needs one
    try:
        for candidate in first[:BATCH]:
            executor.submit(
                build_candidate,
                for_problem,
                candidate,
                toolchain=settings.toolchain,
                render=settings.render,
            )
        return start_host(
            space.problem,
            space,
            settings,
            provers=min(BATCH, cpus),
            races=races,
            is_stopped=lambda: settings.stops_preparing and is_stopped(),
        )
    finally:
        executor.shutdown(cancel_futures=True)


def _build_scalar(problem: Problem, space: Space, settings: SweepSettings) -> Build:
    """Return the fastest of our scalar loops: the baseline where there is no library."""
    plain = replace(plain_problem(problem), reduction=Reduction.ANY)  # it need not be fixed
    # Without features there are no others, and to choose takes a tenth of a second less.
    without_vectors = replace(space.cpu, isa=frozenset())
    candidates = replace(space, problem=plain, cpu=without_vectors, like=None).defaults()
    scalar = min(
        candidates,
        key=lambda one: predict_cycles(
            plain, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )
    family = family_named(scalar.micro_kernel.family)
    return compile_kernel(
        render(plain, scalar, family), isa=family.isa, toolchain=settings.toolchain
    )
