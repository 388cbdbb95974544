"""All trials of one problem: its inputs, exact results and baseline, made once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from gemm_tuner.bench.available_memory import check_memory
from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.baselines.choose import CheckedBaseline, check_baseline, choose_baseline
from gemm_tuner.bench.baselines.onednn import OneDnn
from gemm_tuner.bench.baselines.openblas import OpenBlas
from gemm_tuner.bench.baselines.scalar import ScalarKernel
from gemm_tuner.bench.conditions import gather_conditions
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import Drivers
from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.forked import Death, Result, run_in_child
from gemm_tuner.bench.inputs import InputKind
from gemm_tuner.bench.kernel_callee import KernelCallee
from gemm_tuner.bench.measure import Contestant, measure
from gemm_tuner.bench.regimes import WeightCopies, copies_of_weights, stride_of_copy
from gemm_tuner.bench.roofline import PeakLoop
from gemm_tuner.bench.verify import Case, verify
from gemm_tuner.bench.workload import Callee, make_workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import IsaNotUsable, KernelRejected, TrialFailed
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel

# Bytes for each element of an input and of the result: three kinds of inputs in float32, their
# exact results and bounds in float64, and what is alive while they are computed.
_BYTES_PER_INPUT_ELEMENT = 32
_BYTES_PER_RESULT_ELEMENT = 96

# How many times slower than the baseline a candidate may be before it is said to hang. A scalar
# kernel beside a library with vectors is about this slow. The baseline itself is trusted: it may
# take the time of a slow scalar loop.
_SLOWEST_OVER_BASELINE = 50
_SLOWEST_BASELINE_FLOP_PER_S = 2e8

# The turns of the callees that are timed together.
_BUILD = 0
_BASELINE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a session works on. The problem is in its text form, because steps hold functions."""

    problem_text: str
    threads: int
    baseline: str
    drivers: Drivers
    seed: int
    scalar_build: Build
    stall_timeout_s: float  # besides what the time of the baseline allows


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Ask whether a build is right."""

    build: Build


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRequest:
    """Ask how fast a build is beside the baseline."""

    build: Build
    regime: Regime
    pairs: int
    sample_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Timings taken in the same rounds."""

    build: Timing
    baseline: Timing
    peak_flop_per_s: float


class Session:
    """Does every trial in a child of its own process, which must have no other threads."""

    def __init__(self, setup: Setup, owner: Connection) -> None:
        """Make the inputs and results, and load the baseline.

        Raises:
            BaselineMissing: no baseline can be used.
            NotEnoughMemory: the operands do not fit into this machine.
        """
        self._setup = setup
        self._owner = owner
        self._problem = problem = Problem.parse(setup.problem_text)
        self._cpu = detect_cpu()
        self._report = Report(setup.drivers.crash)
        _check_operands_fit(problem)
        self._cases = {kind: Case(problem, kind, setup.seed) for kind in InputKind}
        flop = problem.flop(problem.m.high)
        self.stall_timeout_s = setup.stall_timeout_s + flop / _SLOWEST_BASELINE_FLOP_PER_S
        checked = self._choose_baseline()
        self.stall_timeout_s = setup.stall_timeout_s + _SLOWEST_OVER_BASELINE * checked.call_s
        self._baseline = checked.baseline
        self.baseline_note = checked.note

    @property
    def baseline_text(self) -> str:
        """Return the name and version of the baseline."""
        return self._baseline.text

    def verify(self, request: VerifyRequest) -> Finding:
        """Return whether a build is right."""

        def task() -> Finding:
            kernel = self._load(request.build)
            return verify(kernel, self._problem, self._cases, self._report)

        try:
            result = self._run(task)
        except (IsaNotUsable, KernelRejected) as refusal:
            return Finding(outcome=Outcome.LOAD_FAILED, detail=str(refusal))
        if isinstance(result, Death):
            return Finding(outcome=result.outcome, detail=result.detail)
        return result

    def time(self, request: TimeRequest) -> TimedFinding:
        """Return the measurement of a build, taken in alternation with the baseline.

        Raises:
            NotEnoughMemory: the copies of the weights do not fit.
            TrialFailed: the baseline ended the child.
        """
        try:
            result = self._run(lambda: self._measure(request))
        except (IsaNotUsable, KernelRejected) as refusal:
            return TimedFinding(finding=Finding(outcome=Outcome.LOAD_FAILED, detail=str(refusal)))
        if isinstance(result, Death):
            if result.running != _BUILD:
                raise TrialFailed(
                    f"the baseline {self.baseline_text} {result.detail} on {self._problem.text}; "
                    "choose another baseline."
                )
            return TimedFinding(finding=Finding(outcome=result.outcome, detail=result.detail))
        return TimedFinding(
            finding=Finding(outcome=Outcome.CORRECT),
            measurement=Measurement(
                candidate=result.build,
                baseline=self.baseline_text,
                baseline_timing=result.baseline,
            ),
            conditions=gather_conditions(
                peak_flop_per_s=result.peak_flop_per_s, baseline=result.baseline
            ),
        )

    def _measure(self, request: TimeRequest) -> _Round:
        inputs = self._cases[InputKind.NORMAL].inputs
        workload = make_workload(self._problem, inputs, threads=self._setup.threads)
        self._report.step(_BUILD)
        kernel = KernelCallee(
            self._load(request.build).library, workload, self._setup.drivers.timer
        )
        self._report.step(_BASELINE)
        baseline = self._baseline.prepare(workload)
        peak_loop = PeakLoop(self._setup.drivers.roofline, self._problem.types.x)
        build_timing, baseline_timing, peak = measure(
            self._make_contestants((kernel, baseline, peak_loop), request.regime),
            pairs=request.pairs,
            sample_ns=request.sample_ns,
            on_turn=self._report.step,
        )
        return _Round(
            build=build_timing,
            baseline=baseline_timing,
            peak_flop_per_s=1e9 * peak_loop.flop_per_call / peak.median_ns,
        )

    def _make_contestants(self, callees: Sequence[Callee], regime: Regime) -> list[Contestant]:
        l3_bytes = self._cpu.caches.l3_bytes
        copies = [
            copies_of_weights(regime, callee.packed_weight_bytes, l3_bytes) for callee in callees
        ]
        check_memory(
            sum(
                count * stride_of_copy(callee.packed_weight_bytes)
                for count, callee in zip(copies, callees, strict=True)
            ),
            f"{max(copies)} copies of the weights of {len(callees)} callees",
        )
        contestants = []
        for index, (count, callee) in enumerate(zip(copies, callees, strict=True)):
            self._report.step(index)
            weights = WeightCopies(
                callee, count, self._setup.seed, on_block=partial(self._report.step, index)
            )
            contestants.append(
                Contestant(callee=callee, weights=weights, is_cold=regime is Regime.COLD_WEIGHTS)
            )
        return contestants

    def _load(self, build: Build) -> Kernel:
        return load_kernel(build.binary, artifact=build.artifact, cpu=self._cpu)

    def _choose_baseline(self) -> CheckedBaseline:
        drivers = self._setup.drivers
        makers: dict[str, Callable[[], Baseline]] = {
            "onednn": lambda: OneDnn(drivers.onednn),
            "openblas": lambda: OpenBlas(drivers.openblas),
            "scalar": lambda: ScalarKernel(self._setup.scalar_build, self._cpu, drivers.timer),
        }
        return choose_baseline(self._setup.baseline, makers, self._check_baseline)

    def _check_baseline(self, baseline: Baseline) -> float | str:
        case = self._cases[InputKind.NORMAL]
        # In a child: a library that has started threads must not be forked.
        result = self._run(lambda: check_baseline(baseline, self._problem, case))
        return result.detail if isinstance(result, Death) else result

    def _run(self, task: Callable[[], Result]) -> Result | Death:
        return run_in_child(
            task,
            report=self._report,
            stall_timeout_s=self.stall_timeout_s,
            owner=self._owner,
        )


def _check_operands_fit(problem: Problem) -> None:
    rows, n, k = problem.m.high, problem.n, problem.k
    needed_bytes = _BYTES_PER_INPUT_ELEMENT * (rows * k + n * k)
    needed_bytes += _BYTES_PER_RESULT_ELEMENT * rows * n
    check_memory(needed_bytes, f"verifying {problem.text}")
