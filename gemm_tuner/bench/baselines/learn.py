"""Learn of a baseline in a process of its own: whether it is right, and how fast it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import thread_time_ns

import numpy as np

from gemm_tuner.bench.baselines.baseline import MOST_MODELS, Baseline
from gemm_tuner.bench.correctness import Case
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.regimes import (
    Pushing,
    WeightCopies,
    copies_of_weights,
    copies_within,
    stride_of_copy,
)
from gemm_tuner.bench.tolerance import Expected, find_error
from gemm_tuner.bench.workload import Runner, make_workload
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.available_memory import check_memory
from gemm_tuner.machine.core_clock import CoreClock
from gemm_tuner.machine.processors import thread_wait_ns

# A library may trade accuracy for speed in its own way, as long as it computes the same thing. One
# that does not fuse the epilogue rounds to the type of y after each step.
_FACTOR = 4.0
_TOLERANCE = 1e-4
_ROUNDINGS_TO_Y = 4.0

_SAMPLES = 7
_SAMPLE_NS = 300_000
_LONG_NS = 20_000_000  # of all calm samples: enough of them
_LONGEST_NS = 400_000_000  # of all samples
_WAITED_SHARE = 0.1  # of a calm sample, in which threads waited for a core
_LEAST_SAMPLES = 3
_LONG_CALL_NS = 200_000_000  # of which one is enough
_MOST_CALLS = 1000
# Of weights that are pushed out of the caches before each sample, which reads no copy twice.
_MOST_COLD_COPIES = MOST_MODELS
_LEAST_COLD_COPIES = 4
_ENOUGH_COLD_BYTES = 64 << 20  # of a sample: to read them takes some milliseconds

_Weights = tuple[WeightCopies, Callable[[], None] | None]  # and what pushes them out before samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was learnt of a baseline in a process of its own: that it is right, and its time.

    `choice` is how it computes; `is_quiet` says that loading it starts no threads.
    """

    text: str
    implementation: str
    call_s: float
    choice: dict[str, str]
    is_quiet: bool


def learn_of_baseline(
    baseline: Baseline,
    problem: Problem,
    case: Case,
    *,
    threads: int,
    l3_bytes: int,
    pushing: Pushing | None,
    on_block: Callable[[], None],
) -> Checked | str:
    """Return the fault of a baseline in words, or what was learnt of it if it is right.

    Its time is that of calls with hot weights, or with those that are cold, beside an L3 of
    `l3_bytes`, from which `pushing` pushes them. `on_block` is called as copies of them are made.

    Raises:
        BaselineMissing: it cannot compute the problem, or be timed in the regime.
        NotEnoughMemory: cold weights do not fit.
    """
    baseline.preload()
    is_quiet = len(list(Path("/proc/self/task").iterdir())) == 1
    make_weights = (
        _hot_weights
        if pushing is None
        else partial(
            _cold_weights,
            baseline,
            threads=threads,
            l3_bytes=l3_bytes,
            pushing=pushing,
            on_block=on_block,
        )
    )
    checked = check_baseline(baseline, problem, case, threads=threads, make_weights=make_weights)
    if isinstance(checked, str):
        return f"{checked}."
    return Checked(
        text=baseline.text,
        implementation=baseline.implementation,
        call_s=checked,
        choice=dict(baseline.choice),
        is_quiet=is_quiet,
    )


def _hot_weights(runner: Runner) -> _Weights:
    return WeightCopies(runner, 1, seed=0), None


def _cold_weights(
    baseline: Baseline,
    runner: Runner,
    *,
    threads: int,
    l3_bytes: int,
    pushing: Pushing,
    on_block: Callable[[], None],
) -> _Weights:
    """Return copies of the weights, and what pushes them out of the caches.

    They are few for one thread: what pushes runs on a core, and leaves the caches of others alone.
    """
    packed_bytes = runner.packed_weight_bytes
    wanted = copies_of_weights(Regime.COLD_WEIGHTS, packed_bytes, l3_bytes)
    copies = min(copies_within(wanted, baseline.most_weight_copies).number, _MOST_COLD_COPIES)
    if threads == 1:
        copies = min(copies, max(_LEAST_COLD_COPIES, _ENOUGH_COLD_BYTES // max(1, packed_bytes)))
    check_memory(copies * stride_of_copy(packed_bytes), f"{copies} copies of the weights")
    return WeightCopies(runner, copies, seed=0, on_block=on_block), pushing.read


def check_baseline(
    baseline: Baseline,
    problem: Problem,
    case: Case,
    *,
    threads: int,
    make_weights: Callable[[Runner], _Weights] = _hot_weights,
) -> float | str:
    """Return the least time of a call in seconds, or in words where its result is wrong."""
    workload = make_workload(problem, case.inputs, threads=threads)
    runner = baseline.prepare(workload)
    weights, push_out = make_weights(runner)
    asked, inputs = baseline.computed(problem, case.inputs)
    if not baseline.fuses_epilogue:
        asked = replace(asked, epilogue=NO_EPILOGUE)
    expected = case.expected if asked == problem else compute_expected(asked, inputs)
    roundoff = problem.types.y.unit_roundoff
    tolerance = max(_TOLERANCE, _ROUNDINGS_TO_Y * roundoff)
    bounds = _FACTOR * expected.bounds + tolerance * (1.0 + np.abs(expected.values))

    if push_out is not None:
        push_out()  # packing has left weights in the caches
    clock = CoreClock(threads)
    clock.start()
    sample = runner.sample(weights.struct, warm_up_calls=0, timed_calls=1)
    first_ns = clock.counted_ns(sample.elapsed_ns)

    error = find_error(Expected(values=expected.values, bounds=bounds), workload.y)
    if error is not None:
        return error
    return least_time_s(runner, weights, int(first_ns), threads=threads, push_out=push_out)


def least_time_s(
    runner: Runner,
    weights: WeightCopies,
    first_ns: int,
    *,
    threads: int,
    push_out: Callable[[], None] | None = None,
    wait_ns: Callable[[], int] = thread_wait_ns,
    cpu_ns: Callable[[], int] = thread_time_ns,
) -> float:
    """Return the least time of a call in a few calm samples, in seconds.

    Threads that were just started may share one core for some time, and a call then takes three
    times as long: samples are taken until enough had a core for each thread, or too many had none.
    Of a call on one thread, the time on a core counts: on a busy machine no long sample is calm.
    Weights that are to be cold are pushed out by `push_out` before each sample, which reads no copy
    twice; a call before it brings back the activations.
    """
    clock = CoreClock(threads, cpu_ns)
    most_calls = _MOST_CALLS if push_out is None else max(1, weights.count - 1)
    least_ns, calm_ns, spent_ns, calm_samples = float(first_ns), 0, 0, 0
    while (calm_ns < _LONG_NS or calm_samples < _LEAST_SAMPLES) and spent_ns < _LONGEST_NS:
        if least_ns >= _LONG_CALL_NS:
            break
        calls = max(1, min(most_calls, int(_SAMPLE_NS / max(1.0, least_ns))))
        if push_out is not None:
            push_out()
            runner.sample(weights.struct, warm_up_calls=0, timed_calls=1)
        waited_before_ns = wait_ns()
        clock.start()
        sample = runner.sample(weights.struct, warm_up_calls=0, timed_calls=calls)
        least_ns = min(least_ns, clock.counted_ns(sample.elapsed_ns) / calls)
        waited_ns = wait_ns() - waited_before_ns
        taken_ns = max(int(sample.elapsed_ns), _LONG_NS // _SAMPLES)
        spent_ns += taken_ns
        if waited_ns <= _WAITED_SHARE * sample.elapsed_ns:
            calm_ns += taken_ns
            calm_samples += 1
    return least_ns / 1e9
