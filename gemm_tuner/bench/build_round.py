"""One timing: builds and baselines in the same rounds, in this process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gemm_tuner.bench.baselines.baseline import Row
from gemm_tuner.bench.baselines.choose import (
    CheckedBaseline,
)
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.limits import (
    LARGE_RATIO,
    generous_epilogue_ns,
    least_arithmetic_ns,
    least_reading_ns,
)
from gemm_tuner.bench.measure import SETTLING_NS, Contestant, TimedRounds, measure
from gemm_tuner.bench.one_thread import OneThreadForm, may_need_one_thread, set_openmp_threads
from gemm_tuner.bench.regimes import (
    Copies,
    Pushing,
    WeightCopies,
    copies_of_weights,
    copies_within,
    pushing_bytes,
    stride_of_copy,
    warm_up_calls,
    warm_up_ns,
)
from gemm_tuner.bench.requests import Setup, TimeRequest
from gemm_tuner.bench.roofline import PeakLoop, ReadLoop, footprint_bytes, roofline_timing
from gemm_tuner.bench.sample import Sample
from gemm_tuner.bench.workload import Runner, Workload, make_workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.measurement import Interference, Limits, Measurement, Raced, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import (
    BaselineMissing,
    NotEnoughMemory,
)
from gemm_tuner.machine.available_memory import check_memory
from gemm_tuner.machine.processors import (
    ProcessorUse,
    read_processor_times,
    thread_wait_ns,
    use_since,
)
from gemm_tuner.runtime.load import Kernel, load_kernel

_PAIRS_OF_CLOSE_LOOK = 5
_MOST = 1e17  # ns, calls, or FLOP/s: three years, or a thousand servers


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRound:
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

    def fault_for(self, builds: int, baselines: int) -> str:
        """Return why this is no round of so many builds and baselines; empty if it may be one.

        A kernel can write such an answer too.
        """
        timings, samples = self.rounds.timings, self.rounds.samples
        if self.builds != builds or len(samples) != len(timings) or not all(samples):
            return f"{self.builds} builds, {len(timings)} timings, {len(samples)} lists of samples"
        if len(self.baselines) != baselines or any(
            not builds <= turn < len(timings) for turn in self.baselines
        ):
            return f"baselines in the turns {self.baselines}"
        if not set(self.plain_ns) <= set(range(baselines)):
            return f"times of the products of {sorted(self.plain_ns)}"
        numbers: list[float] = [one.calls_per_sample for one in timings]
        numbers += [max(one.samples_ns) for one in timings]
        numbers += [self.least_ns, self.epilogue_ns, self.peak_flop_per_s, *self.plain_ns.values()]
        is_sane = (
            all(0 <= one <= _MOST for one in numbers) and self.least_ns and self.peak_flop_per_s
        )
        return "" if is_sane else "times, calls or limits that cannot be"

    def samples_of(self, build: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        """Return the samples of a build and of the first baseline."""
        return self.rounds.samples[build], self.rounds.samples[self.baselines[0]]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimer:
    """Times builds beside baselines, which `rows` list; `report` is told who runs.

    `pushing` is what pushes weights out of the caches, if that was made before.
    """

    setup: Setup
    problem: Problem
    cpu: Cpu
    inputs: Inputs
    rows: Sequence[Row]
    report: Report
    pushing: Pushing | None = None

    def measure(self, request: TimeRequest, baselines: Sequence[CheckedBaseline]) -> BuildRound:
        """Time builds and baselines in turn: first the builds, last the loops of the roofline."""
        workload = make_workload(
            self.problem, self.inputs, threads=self.setup.threads, process=request.process
        )
        kernels = []
        for turn, build in enumerate(request.builds):
            self.report.step(turn)
            library = self._load(build).native
            kernels.append(KernelRunner(library, workload, self.setup.drivers.timer))
        prepared = self._prepare(baselines, workload, len(kernels))
        on_one_thread = self._prepare_on_one_thread(baselines, workload, len(kernels))
        first_form = len(kernels) + len(baselines)
        driver = self.setup.drivers.roofline
        peak_loop = PeakLoop(driver, self.problem.types.x)
        read_loops = [ReadLoop(driver, self.problem, workload.rows)] if request.reads else []
        runners = [
            *kernels,
            *(prepared[checked.name] for checked in baselines),
            *on_one_thread.values(),
            peak_loop,
            *read_loops,
        ]
        turns = {first_form + form: turn for form, turn in enumerate(on_one_thread)}
        own_turns = range(len(kernels), first_form)
        baseline_of = dict(zip(own_turns, baselines, strict=True))
        baseline_of |= {index: baseline_of[turn] for index, turn in turns.items()}
        copies = self._count_copies(request, runners, baseline_of)

        def step(index: int) -> None:
            self.report.step(turns.get(index, index))

        contestants = self._make_contestants(runners, copies, request.regime, workload, step)
        begin = read_processor_times()
        rounds = measure(
            contestants,
            pairs=request.pairs,
            sample_ns=request.sample_ns,
            on_turn=step,
            settling_ns=0 if self.setup.threads == 1 else SETTLING_NS,
            candidates=len(kernels),
            wait_ns=thread_wait_ns,
            keeps_all=request.keeps_all,
        )
        problem_calls = self.problem.flop(workload.rows) / peak_loop.flop_per_call
        peak, *reads = rounds.timings[first_form + len(on_one_thread) :]
        forms = {turn: [turn] for turn in own_turns}
        for form, turn in enumerate(on_one_thread, first_form):
            forms[turn].append(form)
        peak_ns = problem_calls * peak.minimum_ns / self.setup.threads
        timed = BuildRound(
            rounds=rounds,
            builds=len(kernels),
            baselines=tuple(
                min(turns, key=lambda turn: rounds.timings[turn].median_ns)
                for turns in forms.values()
            ),
            use=use_since(begin),
            peak_flop_per_s=1e9 * peak_loop.flop_per_call / peak.median_ns,
            roofline=roofline_timing(
                self.problem,
                workload.rows,
                peak=peak,
                flop_per_peak_call=peak_loop.flop_per_call,
                read=reads[0],
                cores=self.setup.threads,
            )
            if reads
            else None,
            least_ns=least_arithmetic_ns(self.problem, peak_ns, self.cpu.isa),
            epilogue_ns=generous_epilogue_ns(self.problem, workload.rows),
        )
        return self._look_closely(request, baselines, workload, timed)

    def _prepare(
        self, baselines: Sequence[CheckedBaseline], workload: Workload, first_turn: int
    ) -> dict[str, Runner]:
        """Return the runners of baselines by name; the last of the rows is prepared first."""
        prepared: dict[str, Runner] = {}
        for name in reversed([row.name for row in self.rows]):
            for turn, checked in enumerate(baselines, first_turn):
                if checked.name == name:
                    self.report.step(turn)
                    prepared[name] = checked.baseline.prepare(workload)
        return prepared

    def _look_closely(
        self,
        request: TimeRequest,
        baselines: Sequence[CheckedBaseline],
        workload: Workload,
        timed: BuildRound,
    ) -> BuildRound:
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
        plain = replace(workload, problem=replace(self.problem, epilogue=NO_EPILOGUE), operands={})
        of_one_problem = {row.name for row in self.rows if row.one_problem}
        runners: dict[int, Runner] = {}
        for turn in large:
            checked = baselines[turn]
            has_product = checked.baseline.fuses_epilogue and checked.name not in of_one_problem
            if has_product and self.problem.epilogue.steps:
                self.report.step(timed.builds + turn)
                with suppress(BaselineMissing):
                    runners[turn] = checked.baseline.prepare(plain)
        read_loop = ReadLoop(self.setup.drivers.roofline, self.problem, workload.rows)
        all_runners = [*runners.values(), read_loop]
        turns = [timed.builds + turn for turn in runners] + [timed.builds + len(baselines)]
        try:
            copies = self._count_copies(
                replace(request, builds=request.builds[:1]),
                all_runners,
                {index: baselines[turn] for index, turn in enumerate(runners)},
            )
        except NotEnoughMemory:
            return timed

        def step(index: int) -> None:
            self.report.step(turns[index])

        rounds = measure(
            self._make_contestants(all_runners, copies, request.regime, workload, step),
            pairs=_PAIRS_OF_CLOSE_LOOK,
            sample_ns=request.sample_ns,
            on_turn=step,
            settling_ns=0 if self.setup.threads == 1 else SETTLING_NS,
            candidates=len(all_runners),
        )
        *plain_timings, read = rounds.timings
        reading_ns = least_reading_ns(read.minimum_ns, threads=self.setup.threads)
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
        threads = self.setup.threads
        if not may_need_one_thread(self.problem, threads):
            return {}
        forms = {}
        for turn, checked in enumerate(baselines, first_turn):
            if checked.baseline.is_of_openmp and set_openmp_threads(1):
                self.report.step(turn)
                forms[turn] = OneThreadForm(checked.baseline.prepare(workload), threads)
                set_openmp_threads(threads)
        return forms

    def _count_copies(
        self,
        request: TimeRequest,
        runners: Sequence[Runner],
        baseline_of: Mapping[int, CheckedBaseline],
    ) -> list[Copies]:
        """Return how many copies of its weights each runner rotates over.

        `baseline_of` says which baseline a runner is of, by its index, if it is of one.

        Raises:
            BaselineMissing: a baseline has one copy alone, which a sample cannot rotate over.
            NotEnoughMemory: the copies do not fit.
        """
        l3_bytes = self.cpu.caches.l3_bytes
        wanted = [
            copies_of_weights(
                request.regime,
                runner.packed_weight_bytes,
                l3_bytes,
                candidates=len(request.builds),
                sample_ns=request.sample_ns,
            )
            for runner in runners
        ]
        copies = list(map(Copies, wanted))
        for index, checked in baseline_of.items():
            self.report.step(index)
            copies[index] = copies_within(wanted[index], checked.baseline.most_weight_copies)
        self.report.step()
        lacks_pushing = self.pushing is None and any(one.are_few for one in copies)
        check_memory(
            (pushing_bytes(l3_bytes) if lacks_pushing else 0)
            + sum(
                one.number * stride_of_copy(runner.packed_weight_bytes)
                for one, runner in zip(copies, runners, strict=True)
            ),
            f"{max(one.number for one in copies)} copies of the weights of {len(runners)} runners",
        )
        return copies

    def _make_contestants(
        self,
        runners: Sequence[Runner],
        copies: Sequence[Copies],
        regime: Regime,
        workload: Workload,
        step: Callable[[int], None],
    ) -> list[Contestant]:
        touched, l3_bytes = (
            footprint_bytes(self.problem, self.problem.m.high),
            self.cpu.caches.l3_bytes,
        )
        all_bytes = touched + sum(runner.packed_weight_bytes for runner in runners[1:])
        least_ns = warm_up_ns(regime, touched, l3_bytes)
        least_calls = warm_up_calls(regime, all_bytes, l3_bytes)
        pushing = self.pushing
        if pushing is None and any(one.are_few for one in copies):
            pushing = Pushing(l3_bytes, on_block=partial(step, 0))
        contestants = []
        for index, (one, runner) in enumerate(zip(copies, runners, strict=True)):
            step(index)
            weights = WeightCopies(
                runner,
                one.number,
                self.setup.seed,
                on_block=partial(step, index),
                placement=workload.placement,
            )
            contestants.append(
                Contestant(
                    runner=runner,
                    weights=weights,
                    is_cold=regime is Regime.COLD_WEIGHTS,
                    warm_up_ns=0 if isinstance(runner, PeakLoop) else least_ns,
                    least_warm_up_calls=1 if isinstance(runner, PeakLoop) else least_calls,
                    push_out=pushing.read if pushing and one.are_few else None,
                )
            )
        return contestants

    def _load(self, build: Build) -> Kernel:
        return load_kernel(build.binary, artifact=build.artifact, cpu=self.cpu)
