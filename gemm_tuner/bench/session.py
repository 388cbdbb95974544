"""All trials of one problem: its inputs, exact results and baselines, made once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.arrays.quantise import QuantisedWeights
from gemm_tuner.bench.baselines.baseline import Baseline, Copy, Materials, Row
from gemm_tuner.bench.baselines.choose import (
    AUTO,
    CheckedBaseline,
    Choice,
    baseline_rows,
    choose_baselines,
)
from gemm_tuner.bench.baselines.learn import Checked, learn_of_baseline
from gemm_tuner.bench.build_round import BuildRound, RoundTimer
from gemm_tuner.bench.conditions import gather_conditions
from gemm_tuner.bench.correctness import Case, verify
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.emulator import load_for_proof
from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.forked import Death, Guard, Result, run_in_child
from gemm_tuner.bench.inputs import InputKind
from gemm_tuner.bench.plain import PlainBaseline
from gemm_tuner.bench.regimes import Pushing, pushing_bytes
from gemm_tuner.bench.requests import (
    Baselines,
    Opening,
    Setup,
    TimeRequest,
    VerifyRequest,
)
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.sandbox import Sandbox, SandboxLevel
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
from gemm_tuner.sandbox.system_calls import Answer

# Bytes for each element of an input and of the result: three kinds of inputs in float32, their
# exact results and bounds in float64, and temporaries. Where w comes with each call, products of a
# batch have inputs of their own.
_BYTES_PER_INPUT_ELEMENT = 32
_BYTES_PER_OWN_INPUT_ELEMENT = 64
_BYTES_PER_RESULT_ELEMENT = 96

# How many times slower than the baseline a candidate may be before it is said to hang. A scalar
# kernel beside a library with vectors is about this slow. The baseline itself is trusted: it may
# take the time of a slow scalar loop.
_SLOWEST_OVER_BASELINE = 50
_SLOWEST_BASELINE_FLOP_PER_S = 2e8
# A signal for each vector of 64 operations in f16, on a busy machine.
_SLOWEST_EMULATED_FLOP_PER_S = 1e6
_OF_A_PROOF = Guard(answer=Answer.SIGNAL, threads=False)


class Session:
    """Does every trial in a child of its own process, which must have no other threads."""

    def __init__(self, setup: Setup, owner: Connection, scalar_build: Callable[[], Build]) -> None:
        """Make the inputs and results, and load the baselines, of which one may be a scalar loop.

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
        self._pushing: Pushing | None = None
        provers = _provers_that_fit(problem, setup.provers)
        self._cases = {
            kind: Case(problem, kind, setup.seed, fixed_order=setup.drivers.fixed_order)
            for kind in InputKind
        }
        flop = problem.flop(problem.m.high)
        self.stall_timeout_s = setup.stall_timeout_s + flop / _SLOWEST_BASELINE_FLOP_PER_S
        materials = Materials(
            drivers=setup.drivers,
            scalar_build=scalar_build,
            one_thread_build=setup.one_thread_build,
            cpu=self._cpu,
        )
        self._choices = self._choose_baselines(materials)
        told = {regime: self._tell(choice) for regime, choice in self._choices.items()}
        slowest_call_s = max(one.call_s for one in told.values())
        self.stall_timeout_s = setup.stall_timeout_s + _SLOWEST_OVER_BASELINE * slowest_call_s
        self.opening = Opening(baselines=told, provers=provers)

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
            result = self._run(task, Finding, _OF_A_PROOF, extra_s)
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
        choice = self._choices[request.regime]
        baselines = list(choice.baselines)
        left_out: dict[str, str] = {}
        found: dict[int, TimedFinding] = {}
        while living := [turn for turn in range(len(request.builds)) if turn not in found]:
            if not baselines:
                reasons = " ".join(left_out.values())
                raise TrialFailed(f"no baseline could be timed: {reasons} Choose another one.")
            builds = tuple(request.builds[turn] for turn in living)
            try:
                result = self._round_of(replace(request, builds=builds), baselines)
            except (IsaNotUsable, KernelRejected) as refusal:
                result = Death(
                    outcome=Outcome.LOAD_FAILED, detail=str(refusal), running=self._report.running
                )
            except (BaselineMissing, NotEnoughMemory, TrialFailed) as failure:
                turn = self._report.running - len(builds)
                left_out |= _leave_out(baselines, turn, failure)
                continue
            if isinstance(result, BuildRound):
                timed = _timed_findings(
                    baselines, result, left_out, choice.raced, self._setup.sandbox
                )
                if request.keeps_all:
                    timed = [
                        replace(one, samples=result.samples_of(build))
                        for build, one in enumerate(timed)
                    ]
                found |= zip(living, timed, strict=True)
            elif result.running < len(builds):
                turn = living[max(0, result.running)]  # whoever dies may have changed the number
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

    def _round_of(
        self, request: TimeRequest, baselines: Sequence[CheckedBaseline]
    ) -> BuildRound | Death:
        result = self._run(
            partial(self._measure, request, baselines),
            BuildRound,
            _guard_beside(*(checked.baseline for checked in baselines)),
            _preparation_s(baselines),
        )
        if isinstance(result, BuildRound) and (
            fault := result.fault_for(len(request.builds), len(baselines))
        ):
            detail = f"sent what is no answer: {fault}"
            return Death(outcome=Outcome.CRASHED, detail=detail, running=0)
        return result

    def _measure(self, request: TimeRequest, baselines: Sequence[CheckedBaseline]) -> BuildRound:
        timer = RoundTimer(
            setup=self._setup,
            problem=self._problem,
            cpu=self._cpu,
            inputs=self._cases[InputKind.NORMAL].inputs,
            rows=baseline_rows(),
            report=self._report,
            pushing=self._pushing,
        )
        return timer.measure(request, baselines)

    def _choose_baselines(self, materials: Materials) -> dict[Regime, Choice]:
        """Return the baselines in each regime: `auto` may be another one where weights are cold."""
        names, races = self._setup.baselines, self._setup.races
        rows = [
            row
            for row in baseline_rows()
            if row.computes(self._problem.operation) or row.name in names
        ]
        find = partial(self._find_copies, materials)
        if AUTO not in names:
            check = partial(self._check_baseline, Regime.HOT)
            choice = choose_baselines(names, rows, find, check)
            return {race.regime: choice for race in races}
        choices = {
            race.regime: choose_baselines(
                names, rows, find, partial(self._check_baseline, race.regime), race
            )
            for race in races
        }
        chosen = [one.baseline for choice in choices.values() for one in choice.baselines]
        if all(one.most_weight_copies is None for one in chosen):
            self._pushing = None  # only few copies are pushed out again
        return choices

    def _tell(self, choice: Choice) -> Baselines:
        return Baselines(
            texts=tuple(checked.text for checked in choice.baselines),
            implementations={checked.text: checked.implementation for checked in choice.baselines},
            raced=choice.raced,
            product_only=frozenset(
                checked.text
                for checked in choice.baselines
                if not checked.baseline.fuses_epilogue and self._problem.epilogue.steps
            ),
            left_out=choice.left_out,
            call_s=max(checked.call_s for checked in choice.baselines),
        )

    def _find_copies(self, materials: Materials, row: Row) -> Sequence[Copy]:
        """Return the installed copies of a library, with plain weights where it has no others."""
        problem = self._problem
        if not row.computes(problem.operation):
            raise BaselineMissing(
                f"{row.name} is not called for the operation {problem.operation.value!r}; use "
                "another baseline."
            )
        copies = row.find(materials)
        if row.takes_quantised or not problem.types.is_weight_only:
            return copies
        if self._plain_w is None:
            inputs = self._cases[InputKind.NORMAL].inputs
            assert inputs.scales is not None
            quantised = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
            self._plain_w = plain_weights(problem, quantised)
        w = self._plain_w
        return [replace(one, baseline=PlainBaseline(one.baseline, problem, w)) for one in copies]

    def _check_baseline(self, regime: Regime, baseline: Baseline) -> Checked | str:
        baseline.check_problem(self._problem)
        if regime is Regime.COLD_WEIGHTS and self._pushing is None:
            l3_bytes = self._cpu.caches.l3_bytes
            check_memory(pushing_bytes(l3_bytes), "pushing weights out of the caches")
            self._pushing = Pushing(l3_bytes, self._report.step)  # a child reads this memory
        pushing = self._pushing if regime is Regime.COLD_WEIGHTS else None
        case = self._cases[InputKind.NORMAL]
        # In a child: a library may crash, and one that has started threads must not be forked.
        result = self._run(
            lambda: learn_of_baseline(
                baseline,
                self._problem,
                case,
                threads=self._setup.threads,
                l3_bytes=self._cpu.caches.l3_bytes,
                pushing=pushing,
                on_block=self._report.step,
            ),
            Checked | str,
            _guard_beside(baseline),
            baseline.preparation_s,
        )
        return result.detail if isinstance(result, Death) else result

    def _run(
        self,
        task: Callable[[], Result],
        wanted: Any,  # noqa: ANN401 - a type
        guard: Guard,
        extra_s: float = 0.0,
    ) -> Result | Death:
        return run_in_child(
            task,
            wanted=wanted,
            report=self._report,
            stall_timeout_s=self.stall_timeout_s + extra_s,
            owner=self._owner,
            guard=None if self._setup.sandbox.level is SandboxLevel.NONE else guard,
        )


def _guard_beside(*baselines: Baseline) -> Guard:
    """Return what kernels may not do that run in one process with libraries."""
    return Guard(
        answer=Answer.ERROR,
        threads=True,
        programs=any(baseline.starts_programs for baseline in baselines),
    )


def _timed_findings(
    baselines: Sequence[CheckedBaseline],
    timed: BuildRound,
    left_out: dict[str, str],
    raced: tuple[Raced, ...],
    sandbox: Sandbox,
) -> list[TimedFinding]:
    """Return the ratios of each build to each baseline, in the rounds that both took part in."""
    conditions = gather_conditions(
        peak_flop_per_s=timed.peak_flop_per_s,
        baseline=timed.rounds.timings[timed.baselines[0]],
        sandbox=sandbox,
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
    has_own = not problem.operation.packs_ahead
    element_bytes = _BYTES_PER_OWN_INPUT_ELEMENT if has_own else _BYTES_PER_INPUT_ELEMENT
    needed_bytes = element_bytes * (rows * k + n * k)
    needed_bytes += _BYTES_PER_RESULT_ELEMENT * rows * n
    check_memory(needed_bytes, f"verifying {problem.text}")
    # Half of it is shared, and half is alive while one of them computes.
    return max(1, min(wanted, 2 * available_memory_bytes() // max(1, needed_bytes) - 1))
