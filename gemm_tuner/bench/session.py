"""All trials of one problem: its inputs, exact results and baselines, made once."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.arrays.quantise import QuantisedWeights
from gemm_tuner.bench.baselines.baseline import Baseline, Copy, Materials, Row
from gemm_tuner.bench.baselines.choose import (
    Checked,
    CheckedBaseline,
    Race,
    baseline_rows,
    choose_baselines,
    learn_of_baseline,
)
from gemm_tuner.bench.conditions import gather_conditions
from gemm_tuner.bench.correctness import Case, verify
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import Drivers
from gemm_tuner.bench.emulator import Emulation, load_for_proof
from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.forked import Death, Result, run_in_child
from gemm_tuner.bench.inputs import InputKind
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.limits import (
    LARGE_RATIO,
    generous_epilogue_ns,
    least_arithmetic_ns,
    least_reading_ns,
)
from gemm_tuner.bench.measure import SETTLING_NS, Contestant, TimedRounds, measure
from gemm_tuner.bench.one_thread import OneThreadForm, may_need_one_thread, set_openmp_threads
from gemm_tuner.bench.plain import PlainBaseline
from gemm_tuner.bench.regimes import (
    WeightCopies,
    copies_of_weights,
    stride_of_copy,
    warm_up_calls,
    warm_up_ns,
)
from gemm_tuner.bench.roofline import PeakLoop, ReadLoop, footprint_bytes, roofline_timing
from gemm_tuner.bench.workload import Runner, Workload, make_workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.measurement import Interference, Limits, Measurement, Raced, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import (
    BaselineMissing,
    GemmTunerError,
    IsaNotUsable,
    KernelRejected,
    NotEnoughMemory,
    TrialFailed,
)
from gemm_tuner.libraries.plain import plain_weights
from gemm_tuner.machine.available_memory import available_memory_bytes, check_memory
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.processors import (
    ProcessorUse,
    read_processor_times,
    thread_wait_ns,
    use_since,
)
from gemm_tuner.runtime.load import Kernel, load_kernel

# Bytes for each element of an input and of the result: three kinds of inputs in float32, their
# exact results and bounds in float64, and temporaries.
_BYTES_PER_INPUT_ELEMENT = 32
_BYTES_PER_RESULT_ELEMENT = 96

_PAIRS_OF_CLOSE_LOOK = 5

# How many times slower than the baseline a candidate may be before it is said to hang. A scalar
# kernel beside a library with vectors is about this slow. The baseline itself is trusted: it may
# take the time of a slow scalar loop.
_SLOWEST_OVER_BASELINE = 50
_SLOWEST_BASELINE_FLOP_PER_S = 2e8
# A signal for each vector of 64 operations in f16, on a busy machine.
_SLOWEST_EMULATED_FLOP_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments of a session. The problem is in its text form, because steps hold functions."""

    problem_text: str
    threads: int
    baselines: tuple[str, ...]
    drivers: Drivers
    seed: int
    scalar_build: Build
    one_thread_build: Build | None = None
    stall_timeout_s: float  # besides what the time of the baseline allows
    provers: int = 1  # builds that are verified at the same time, if memory suffices
    race: Race = field(default_factory=Race)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The baselines of a session: their names and versions, in order.

    `implementations` say by what each computes, and `raced` are the libraries that the first was
    chosen from. `product_only` are those that leave the epilogue out. `left_out` says by name why a
    baseline is not among them. `slowest_call_s` is the least time of a call of
    the slowest. As many builds as `provers` can be verified at the same time.
    """

    baselines: tuple[str, ...]
    implementations: tuple[str, ...]
    raced: tuple[Raced, ...]
    product_only: frozenset[str]
    left_out: dict[str, str]
    slowest_call_s: float
    provers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """Ask whether a build is right, on this CPU or with features that it lacks."""

    build: Build
    emulation: Emulation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRequest:
    """Ask how fast builds for the same thing are, beside each other and the baselines.

    With `reads`, a loop that only reads takes part. With `checks_large_ratios`, a baseline that is
    much slower than a build is timed without the epilogue, too.
    """

    builds: tuple[Build, ...]
    regime: Regime
    pairs: int
    sample_ns: int
    reads: bool = False
    checks_large_ratios: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Timings taken in the same rounds.

    The first `builds` contestants are builds. `baselines` says which contestant each baseline is:
    the faster of its forms. `use` is what the processors did meanwhile, if it is known. `plain_ns`
    are the times of calls without the epilogue, of those baselines that were looked at closely.
    """

    rounds: TimedRounds
    builds: int
    baselines: tuple[int, ...]
    peak_flop_per_s: float
    roofline: Timing | None
    use: ProcessorUse | None
    least_ns: float
    plain_ns: dict[int, float] = field(default_factory=dict)
    epilogue_ns: float

    def beside(
        self, build: int, baseline: int, checked: CheckedBaseline, raced: tuple[Raced, ...]
    ) -> Measurement:
        """Return the measurement of a build beside a baseline, in the rounds of both."""
        turn = self.baselines[baseline]
        ours, theirs = self.rounds.timings[build], self.rounds.timings[turn]
        return Measurement(
            candidate=ours.first(len(theirs.samples_ns)),
            baseline=checked.text,
            implementation=checked.implementation,
            raced=raced,
            baseline_timing=theirs.first(len(ours.samples_ns)),
            interference=Interference(
                disturbed_rounds=self.rounds.disturbed_share(build, turn),
                stolen=self.use.stolen if self.use else 0.0,
                others=self.use.others if self.use else 0.0,
            ),
            limits=Limits(
                least_ns=self.least_ns,
                plain_ns=self.plain_ns.get(baseline),
                epilogue_ns=self.epilogue_ns if baseline in self.plain_ns else None,
            ),
        )


class Session:
    """Does every trial in a child of its own process, which must have no other threads."""

    def __init__(self, setup: Setup, owner: Connection) -> None:
        """Make the inputs and results, and load the baselines.

        Raises:
            BaselineMissing: no baseline can be used.
            NotEnoughMemory: the operands do not fit into this machine.
        """
        self._setup = setup
        self._owner = owner
        self._problem = problem = Problem.parse(setup.problem_text)
        self._cpu = detect_cpu()
        self._report = Report(setup.drivers.crash)
        self._plain_w: NDArray[Any] | None = None
        provers = _provers_that_fit(problem, setup.provers)
        self._cases = {kind: Case(problem, kind, setup.seed) for kind in InputKind}
        flop = problem.flop(problem.m.high)
        self.stall_timeout_s = setup.stall_timeout_s + flop / _SLOWEST_BASELINE_FLOP_PER_S
        materials = Materials(
            drivers=setup.drivers,
            scalar_build=setup.scalar_build,
            one_thread_build=setup.one_thread_build,
            cpu=self._cpu,
        )
        choice = choose_baselines(
            setup.baselines,
            baseline_rows(),
            partial(self._find_copies, materials),
            self._check_baseline,
            setup.race,
        )
        self._baselines = choice.baselines
        self._raced = choice.raced
        slowest_call_s = max(checked.call_s for checked in choice.baselines)
        self.stall_timeout_s = setup.stall_timeout_s + _SLOWEST_OVER_BASELINE * slowest_call_s
        self.opening = Opening(
            baselines=tuple(checked.text for checked in choice.baselines),
            implementations=tuple(checked.implementation for checked in choice.baselines),
            raced=choice.raced,
            product_only=frozenset(
                checked.text
                for checked in choice.baselines
                if not checked.baseline.fuses_epilogue and self._problem.epilogue.steps
            ),
            left_out=choice.left_out,
            slowest_call_s=slowest_call_s,
            provers=provers,
        )

    def go_on_in_fork(self, owner: Connection) -> None:
        """Work for `owner` from now on, in a process that was forked when all was prepared."""
        self._owner = owner
        self._report = Report(self._setup.drivers.crash)

    def verify(self, request: VerifyRequest) -> Finding:
        """Return whether a build is right."""
        emulation = request.emulation
        emulated: frozenset[IsaFeature] = emulation.features if emulation else frozenset()

        def task() -> Finding:
            kernel = load_for_proof(
                request.build, cpu=self._cpu, emulation=emulation, report=self._report
            )
            return verify(kernel, self._problem, self._cases, self._report)

        flop = self._problem.flop(self._problem.m.high)
        extra_s = flop / _SLOWEST_EMULATED_FLOP_PER_S if emulation else 0.0
        try:
            result = self._run(task, extra_s)
        except (IsaNotUsable, KernelRejected) as refusal:
            return Finding(outcome=Outcome.LOAD_FAILED, detail=str(refusal), emulated=emulated)
        if isinstance(result, Death):
            return Finding(outcome=result.outcome, detail=result.detail, emulated=emulated)
        return replace(result, emulated=emulated)

    def time(self, request: TimeRequest) -> tuple[TimedFinding, ...]:
        """Return the result of each build, timed in alternation with the others and the baselines.

        A build that ends the child or refuses has failed, a baseline that does so is left out, and
        the others are timed again. Builds that do not fit into memory together are timed apart; one
        that does not fit alone has no measurement.

        Raises:
            NotEnoughMemory: the copies of the weights of no build fit.
            TrialFailed: no baseline is left.
        """
        try:
            return self._time_together(request)
        except NotEnoughMemory:
            if len(request.builds) == 1:
                raise
        found: list[TimedFinding] = []
        refusals: list[NotEnoughMemory] = []
        for build in request.builds:
            try:
                found += self._time_together(replace(request, builds=(build,)))
            except NotEnoughMemory as refusal:
                unknown = Finding(outcome=Outcome.CORRECT, detail=str(refusal))
                found.append(TimedFinding(finding=unknown))
                refusals.append(refusal)
        if len(refusals) == len(request.builds):
            raise refusals[0]
        return tuple(found)

    def _time_together(self, request: TimeRequest) -> tuple[TimedFinding, ...]:
        baselines = list(self._baselines)
        left_out: dict[str, str] = {}
        found: dict[int, TimedFinding] = {}
        while living := [turn for turn in range(len(request.builds)) if turn not in found]:
            if not baselines:
                reasons = " ".join(left_out.values())
                raise TrialFailed(f"no baseline could be timed: {reasons} Choose another one.")
            builds = tuple(request.builds[turn] for turn in living)
            try:
                result = self._run(
                    partial(self._measure, replace(request, builds=builds), baselines),
                    _preparation_s(baselines),
                )
            except (IsaNotUsable, KernelRejected) as refusal:
                result = Death(
                    outcome=Outcome.LOAD_FAILED, detail=str(refusal), running=self._report.running
                )
            except (BaselineMissing, NotEnoughMemory, TrialFailed) as failure:
                turn = self._report.running - len(builds)
                left_out |= _leave_out(baselines, turn, failure)
                continue
            if isinstance(result, _Round):
                timed = _timed_findings(baselines, result, left_out, self._raced)
                found |= zip(living, timed, strict=True)
            elif result.running < len(builds):
                turn = living[result.running]
                if len(builds) > 1:  # another may have spoiled its memory
                    (found[turn],) = self._time_together(
                        replace(request, builds=(request.builds[turn],))
                    )
                else:
                    failed = Finding(outcome=result.outcome, detail=result.detail)
                    found[turn] = TimedFinding(finding=failed)
            else:
                death = TrialFailed(f"it {result.detail} on {self._problem.text}.")
                left_out |= _leave_out(baselines, result.running - len(builds), death)
        return tuple(found[turn] for turn in range(len(request.builds)))

    def _measure(self, request: TimeRequest, baselines: Sequence[CheckedBaseline]) -> _Round:
        """Time builds and baselines in turn: first the builds, last the loops of the roofline."""
        inputs = self._cases[InputKind.NORMAL].inputs
        workload = make_workload(self._problem, inputs, threads=self._setup.threads)
        kernels = []
        for turn, build in enumerate(request.builds):
            self._report.step(turn)
            library = self._load(build).native
            kernels.append(KernelRunner(library, workload, self._setup.drivers.timer))
        prepared: dict[str, Runner] = {}
        for name in reversed([row.name for row in baseline_rows()]):
            for turn, checked in enumerate(baselines, len(kernels)):
                if checked.name == name:
                    self._report.step(turn)
                    prepared[name] = checked.baseline.prepare(workload)
        on_one_thread = self._prepare_on_one_thread(baselines, workload, len(kernels))
        first_form = len(kernels) + len(baselines)
        driver = self._setup.drivers.roofline
        peak_loop = PeakLoop(driver, self._problem.types.x)
        read_loops = [ReadLoop(driver, self._problem, workload.rows)] if request.reads else []
        runners = [
            *kernels,
            *(prepared[checked.name] for checked in baselines),
            *on_one_thread.values(),
            peak_loop,
            *read_loops,
        ]
        copies = self._count_copies(request, runners, baselines)
        turns = {first_form + form: turn for form, turn in enumerate(on_one_thread)}

        def step(index: int) -> None:
            self._report.step(turns.get(index, index))

        contestants = self._make_contestants(runners, copies, request.regime, step)
        begin = read_processor_times()
        rounds = measure(
            contestants,
            pairs=request.pairs,
            sample_ns=request.sample_ns,
            on_turn=step,
            settling_ns=0 if self._setup.threads == 1 else SETTLING_NS,
            candidates=len(kernels),
            wait_ns=thread_wait_ns,
        )
        problem_calls = self._problem.flop(workload.rows) / peak_loop.flop_per_call
        peak, *reads = rounds.timings[first_form + len(on_one_thread) :]
        forms = {turn: [turn] for turn in range(len(kernels), first_form)}
        for form, turn in enumerate(on_one_thread, first_form):
            forms[turn].append(form)
        peak_ns = problem_calls * peak.minimum_ns / self._setup.threads
        timed = _Round(
            rounds=rounds,
            builds=len(kernels),
            baselines=tuple(
                min(turns, key=lambda turn: rounds.timings[turn].median_ns)
                for turns in forms.values()
            ),
            use=use_since(begin),
            peak_flop_per_s=1e9 * peak_loop.flop_per_call / peak.median_ns,
            roofline=roofline_timing(
                self._problem,
                workload.rows,
                peak=peak,
                flop_per_peak_call=peak_loop.flop_per_call,
                read=reads[0],
                cores=self._setup.threads,
            )
            if reads
            else None,
            least_ns=least_arithmetic_ns(self._problem, peak_ns, self._cpu.isa),
            epilogue_ns=generous_epilogue_ns(self._problem, workload.rows),
        )
        return self._look_closely(request, baselines, workload, timed)

    def _look_closely(
        self,
        request: TimeRequest,
        baselines: Sequence[CheckedBaseline],
        workload: Workload,
        timed: _Round,
    ) -> _Round:
        """Add what tells whether large ratios are plausible, timed right after the rounds.

        That is a loop that only reads, and each baseline that is much slower than a build, without
        the epilogue.
        """
        large = [
            turn
            for turn, checked in enumerate(baselines)
            if any(
                timed.beside(build, turn, checked, ()).ratio.median > LARGE_RATIO
                for build in range(timed.builds)
            )
        ]
        if not (request.checks_large_ratios and large):
            return timed
        plain = replace(workload, problem=replace(self._problem, epilogue=NO_EPILOGUE), operands={})
        of_one_problem = {row.name for row in baseline_rows() if row.one_problem}
        runners: dict[int, Runner] = {}
        for turn in large:
            checked = baselines[turn]
            has_product = checked.baseline.fuses_epilogue and checked.name not in of_one_problem
            if has_product and self._problem.epilogue.steps:
                self._report.step(timed.builds + turn)
                with suppress(BaselineMissing):
                    runners[turn] = checked.baseline.prepare(plain)
        read_loop = ReadLoop(self._setup.drivers.roofline, self._problem, workload.rows)
        all_runners = [*runners.values(), read_loop]
        turns = [timed.builds + turn for turn in runners] + [timed.builds + len(baselines)]
        try:
            copies = self._count_copies(
                replace(request, builds=request.builds[:1]), all_runners, ()
            )
        except NotEnoughMemory:
            return timed

        def step(index: int) -> None:
            self._report.step(turns[index])

        rounds = measure(
            self._make_contestants(all_runners, copies, request.regime, step),
            pairs=_PAIRS_OF_CLOSE_LOOK,
            sample_ns=request.sample_ns,
            on_turn=step,
            settling_ns=0 if self._setup.threads == 1 else SETTLING_NS,
            candidates=len(all_runners),
        )
        *plain_timings, read = rounds.timings
        reading_ns = least_reading_ns(read.minimum_ns, threads=self._setup.threads)
        return replace(
            timed,
            least_ns=max(timed.least_ns, reading_ns),
            plain_ns={
                turn: timing.median_ns for turn, timing in zip(runners, plain_timings, strict=True)
            },
        )

    def _prepare_on_one_thread(
        self, baselines: Sequence[CheckedBaseline], workload: Workload, first_turn: int
    ) -> dict[int, OneThreadForm]:
        """Return the baselines on one thread, where that may be faster, by their turn."""
        threads = self._setup.threads
        if not may_need_one_thread(self._problem, threads):
            return {}
        forms = {}
        for turn, checked in enumerate(baselines, first_turn):
            if checked.baseline.is_of_openmp and set_openmp_threads(1):
                self._report.step(turn)
                forms[turn] = OneThreadForm(checked.baseline.prepare(workload), threads)
                set_openmp_threads(threads)
        return forms

    def _count_copies(
        self, request: TimeRequest, runners: Sequence[Runner], baselines: Sequence[CheckedBaseline]
    ) -> list[int]:
        """Return how many copies of its weights each runner rotates over.

        Raises:
            BaselineMissing: a baseline cannot rotate over as many.
            NotEnoughMemory: the copies do not fit.
        """
        l3_bytes = self._cpu.caches.l3_bytes
        copies = [
            copies_of_weights(
                request.regime,
                runner.packed_weight_bytes,
                l3_bytes,
                candidates=len(request.builds),
                sample_ns=request.sample_ns,
            )
            for runner in runners
        ]
        for turn, checked in enumerate(baselines, len(request.builds)):
            most = checked.baseline.most_weight_copies
            if most is not None and copies[turn] > most:
                self._report.step(turn)
                raise BaselineMissing(
                    f"its calls can rotate over {most} copies of the weights, but cold weights of "
                    f"this size need {copies[turn]}; time it with hot weights."
                )
        self._report.step()
        check_memory(
            sum(
                count * stride_of_copy(runner.packed_weight_bytes)
                for count, runner in zip(copies, runners, strict=True)
            ),
            f"{max(copies)} copies of the weights of {len(runners)} runners",
        )
        return copies

    def _make_contestants(
        self,
        runners: Sequence[Runner],
        copies: Sequence[int],
        regime: Regime,
        step: Callable[[int], None],
    ) -> list[Contestant]:
        touched, l3_bytes = (
            footprint_bytes(self._problem, self._problem.m.high),
            self._cpu.caches.l3_bytes,
        )
        all_bytes = touched + sum(runner.packed_weight_bytes for runner in runners[1:])
        least_ns = warm_up_ns(regime, touched, l3_bytes)
        least_calls = warm_up_calls(regime, all_bytes, l3_bytes)
        contestants = []
        for index, (count, runner) in enumerate(zip(copies, runners, strict=True)):
            step(index)
            weights = WeightCopies(runner, count, self._setup.seed, on_block=partial(step, index))
            contestants.append(
                Contestant(
                    runner=runner,
                    weights=weights,
                    is_cold=regime is Regime.COLD_WEIGHTS,
                    warm_up_ns=0 if isinstance(runner, PeakLoop) else least_ns,
                    least_warm_up_calls=1 if isinstance(runner, PeakLoop) else least_calls,
                )
            )
        return contestants

    def _load(self, build: Build) -> Kernel:
        return load_kernel(build.binary, artifact=build.artifact, cpu=self._cpu)

    def _find_copies(self, materials: Materials, row: Row) -> Sequence[Copy]:
        """Return the installed copies of a library, with plain weights where it has no others."""
        copies = row.find(materials)
        problem = self._problem
        if row.takes_quantised or not problem.types.is_weight_only:
            return copies
        if self._plain_w is None:
            inputs = self._cases[InputKind.NORMAL].inputs
            assert inputs.scales is not None
            quantised = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
            self._plain_w = plain_weights(problem, quantised)
        w = self._plain_w
        return [replace(one, baseline=PlainBaseline(one.baseline, problem, w)) for one in copies]

    def _check_baseline(self, baseline: Baseline) -> Checked | str:
        case = self._cases[InputKind.NORMAL]
        # In a child: a library may crash, and one that has started threads must not be forked.
        result = self._run(
            lambda: learn_of_baseline(baseline, self._problem, case, threads=self._setup.threads),
            baseline.preparation_s,
        )
        return result.detail if isinstance(result, Death) else result

    def _run(self, task: Callable[[], Result], extra_s: float = 0.0) -> Result | Death:
        return run_in_child(
            task,
            report=self._report,
            stall_timeout_s=self.stall_timeout_s + extra_s,
            owner=self._owner,
        )


def _timed_findings(
    baselines: Sequence[CheckedBaseline],
    timed: _Round,
    left_out: dict[str, str],
    raced: tuple[Raced, ...],
) -> list[TimedFinding]:
    """Return the ratios of each build to each baseline, in the rounds that both took part in."""
    conditions = gather_conditions(
        peak_flop_per_s=timed.peak_flop_per_s,
        baseline=timed.rounds.timings[timed.baselines[0]],
    )
    return [
        TimedFinding(
            finding=Finding(outcome=Outcome.CORRECT),
            measurements=tuple(
                timed.beside(build, turn, checked, raced) for turn, checked in enumerate(baselines)
            ),
            conditions=conditions,
            roofline=timed.roofline,
            left_out=left_out,
        )
        for build in range(timed.builds)
    ]


def _leave_out(
    baselines: list[CheckedBaseline], turn: int, failure: GemmTunerError
) -> dict[str, str]:
    """Remove the baseline that failed in its turn; return its name and the reason.

    Raises:
        GemmTunerError: no baseline ran.
    """
    if not 0 <= turn < len(baselines):
        raise failure
    failed = baselines.pop(turn)
    return {failed.name: f"{failed.text}: {failure}"}


def _preparation_s(baselines: Sequence[CheckedBaseline]) -> float:
    return max(checked.baseline.preparation_s for checked in baselines)


def _provers_that_fit(problem: Problem, wanted: int) -> int:
    """Return how many builds can be verified at the same time, at most as many as are wanted.

    Raises:
        NotEnoughMemory: not even one.
    """
    rows, n, k = problem.m.high, problem.n, problem.k
    needed_bytes = _BYTES_PER_INPUT_ELEMENT * (rows * k + n * k)
    needed_bytes += _BYTES_PER_RESULT_ELEMENT * rows * n
    check_memory(needed_bytes, f"verifying {problem.text}")
    # Half of it is shared, and half is alive while one of them computes.
    return max(1, min(wanted, 2 * available_memory_bytes() // max(1, needed_bytes) - 1))
