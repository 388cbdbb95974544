"""Time the parts of a kernel's calls, each on this core while no other part runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gemm_tuner.abi import KernelLibrary
from gemm_tuner.bench.drivers import build_timer
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.regimes import WeightCopies, copies_of_weights
from gemm_tuner.bench.roofline import footprint_bytes
from gemm_tuner.bench.workload import Workload, make_workload
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.machine.available_memory import check_memory
from gemm_tuner.machine.processors import thread_wait_ns
from gemm_tuner.space.limits import check_covers

_SAMPLE_NS = 100_000
_SAMPLES = 3
_TRIES = 12
_WAITED_NS = 10_000  # to be woken takes less
_SEED = 1
_BYTES_PER_BYTE = 10  # inputs in float32 and float64, the copy that is timed, packed weights


def build_parts_timer(
    problem: Problem,
    candidate: Candidate,
    *,
    cpu: Cpu,
    toolchain: Toolchain,
    rows: int | None = None,
) -> "PartsTimer":
    """Return a timer of the kernel of a candidate; its calls have the most rows, or so many.

    Raises:
        CompilationFailed: the compiler refused the kernel.
        KernelRejected: it cannot be loaded.
        NotEnoughMemory: the operands do not fit.
    """
    m = problem.m.high if rows is None else rows
    of_call = replace(problem, m=Rows(low=m, high=m))
    check_memory(_BYTES_PER_BYTE * footprint_bytes(problem, m), "timing the parts")
    family = check_covers(problem, candidate)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=toolchain)
    workload = make_workload(
        of_call, make_inputs(of_call, InputKind.NORMAL, _SEED), threads=cpu.physical_cores
    )
    timer = build_timer(toolchain)
    library = KernelLibrary(build.binary)
    return PartsTimer(library, workload, timer, l3_bytes=cpu.caches.l3_bytes)


class PartsTimer:
    """A kernel whose parts are timed, and its calls in the pool, on the same arrays."""

    def __init__(
        self, library: KernelLibrary, workload: Workload, timer: Path, *, l3_bytes: int
    ) -> None:
        """Pack the weights; those of the cold regime are packed when they are asked for."""
        self._library = library
        self._workload = workload
        self._timer = timer
        self._l3_bytes = l3_bytes
        self._runners: dict[int, KernelRunner] = {}
        self._weights: dict[Regime, WeightCopies] = {}

    def times_ns(
        self, parts: int, turns: Sequence[Sequence[int]], regime: Regime = Regime.HOT
    ) -> list[list[float]]:
        """Return the time of each of `parts` parts, for each phase; of parts in no turn, 0.

        The parts of a turn run one after the other, again and again, so that each finds the caches
        as the others left them. Cold, each round has other weights.
        """
        runner, weights = self._runner(parts), self._copies(regime)
        times = [[0.0] * parts for _phase in range(runner.phases)]
        for phase, of_phase in enumerate(times):
            for turn in turns:
                found = _times_of_turn(runner, weights, turn, phase)
                for part, time_ns in zip(turn, found, strict=True):
                    of_phase[part] = time_ns
        return times

    def call_ns(self, threads: int, regime: Regime) -> float:
        """Return the time of a call in as many parts, in threads of the package's pool."""
        runner, weights = self._runner(threads), self._copies(regime)
        once = runner.sample(weights.struct, warm_up_calls=1, timed_calls=1)
        calls = max(1, _SAMPLE_NS // max(1, once.elapsed_ns))

        def sample() -> list[float]:
            found = runner.sample(weights.struct, warm_up_calls=1, timed_calls=calls)
            return [found.elapsed_ns / calls]

        return _least_of_calm(sample)[0]

    def _runner(self, parts: int) -> KernelRunner:
        if parts not in self._runners:
            self._runners[parts] = KernelRunner(
                self._library, self._workload, self._timer, parts=parts
            )
        return self._runners[parts]

    def _copies(self, regime: Regime) -> WeightCopies:
        if regime not in self._weights:
            runner = self._runner(1)
            copies = copies_of_weights(regime, runner.packed_weight_bytes, self._l3_bytes)
            self._weights[regime] = WeightCopies(runner, copies, _SEED)
        return self._weights[regime]


def _times_of_turn(
    runner: KernelRunner, weights: WeightCopies, turn: Sequence[int], phase: int
) -> list[float]:
    """Return the least ns of each part of a turn, after one round that does not count."""
    once = runner.time_parts(weights.struct, turn, phase=phase, calls=1)
    calls = max(1, int(_SAMPLE_NS // max(1.0, sum(once))))
    return _least_of_calm(lambda: runner.time_parts(weights.struct, turn, phase=phase, calls=calls))


def _least_of_calm(sample: Callable[[], list[float]]) -> list[float]:
    """Return the least of some samples during which no thread waited for a core, if there are any.

    On a busy machine there are more tries.
    """
    samples = []
    calm = 0
    for _try in range(_TRIES):
        waited_ns = -thread_wait_ns()
        samples.append(sample())
        waited_ns += thread_wait_ns()
        calm += waited_ns <= _WAITED_NS
        if calm == _SAMPLES:
            break
    return [min(times) for times in zip(*samples, strict=True)]
