"""A session in the process of the test: what ends a trial, and what is left out of one."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe

import numpy as np
import pytest
from planted import PROBLEM, RIGHT, build_planted

from gemm_tuner.bench import session
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Baseline, Copy, Materials, Row
from gemm_tuner.bench.baselines.choose import CheckedBaseline, Race, baseline_rows
from gemm_tuner.bench.baselines.learn import Checked
from gemm_tuner.bench.baselines.own_kernel import ScalarKernel
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct, build_drivers
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.limits import LARGE_RATIO
from gemm_tuner.bench.requests import Setup, TimeRequest
from gemm_tuner.bench.workload import Workload
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.doubt import why_implausible
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.sandbox import Sandbox, SandboxLevel
from gemm_tuner.errors import BaselineMissing, NotEnoughMemory
from gemm_tuner.machine.detect import detect_cpu

TIMING_PAIRS = 5
SAMPLE_NS = 20_000


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


def _session(
    toolchain: Toolchain,
    owner: Connection,
    statement: str = RIGHT,
    baselines: tuple[str, ...] = ("scalar",),
    regimes: Sequence[Regime] = (Regime.HOT,),
) -> session.Session:
    """Return a session in this process, whose scalar baseline does `statement`."""
    return session.Session(
        Setup(
            problem_text=PROBLEM.text,
            threads=1,
            baselines=baselines,
            drivers=build_drivers(toolchain, detect_cpu()),
            seed=3,
            stall_timeout_s=5.0,
            races=tuple(Race(regime=regime) for regime in regimes),
            sandbox=Sandbox(level=SandboxLevel.LIMITS),
        ),
        owner,
        lambda: build_planted(toolchain, statement),
    )


def test_stall_timeout_follows_the_baseline_and_not_the_arithmetic(
    toolchain: Toolchain,
) -> None:
    slow = RIGHT + 'for (int spin = 0; spin < 1000000; spin++) __asm__ volatile("");'
    owner, other = Pipe()
    with owner, other:
        fast_baseline = _session(toolchain, owner)
        slow_baseline = _session(toolchain, owner, slow)

    assert 5.0 < fast_baseline.stall_timeout_s < slow_baseline.stall_timeout_s


def test_a_build_that_does_not_fit_into_memory_leaves_the_others(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = build_planted(toolchain, RIGHT + "/* large */")
    small = build_planted(toolchain)
    _let_not_fit(monkeypatch, large)
    owner, other = Pipe()
    with owner, other:
        trials = _session(toolchain, owner)
        found = trials.time(_request(small, large, small))
        with pytest.raises(NotEnoughMemory, match="GiB"):
            trials.time(_request(large))

    assert [one.finding.outcome for one in found] == [Outcome.CORRECT] * 3
    assert [one.measurement is None for one in found] == [False, True, False]
    assert "GiB" in found[1].finding.detail


def _let_not_fit(monkeypatch: pytest.MonkeyPatch, large: Build) -> None:
    """Let a build not fit into memory, neither alone nor beside others."""
    measure = session.Session._measure

    def measure_what_fits(
        trials: session.Session,
        request: TimeRequest,
        baselines: list[CheckedBaseline],
    ) -> object:
        if large in request.builds:
            raise NotEnoughMemory("it takes 1000 GiB; choose smaller sizes.")
        return measure(trials, request, baselines)

    monkeypatch.setattr(session.Session, "_measure", measure_what_fits)


def _request(
    *builds: Build, regime: Regime = Regime.HOT, checks_large_ratios: bool = False
) -> TimeRequest:
    return TimeRequest(
        builds=builds,
        regime=regime,
        pairs=TIMING_PAIRS,
        sample_ns=SAMPLE_NS,
        checks_large_ratios=checks_large_ratios,
    )


class Troublesome(AnyBaseline):
    """The scalar kernel as a baseline that is right, and fails in some way when it is timed."""

    text = "troublesome 1"
    fuses_epilogue = True

    def __init__(self, materials: Materials, trouble: Callable[[], object]) -> None:
        self._kernel = ScalarKernel(
            materials.scalar_build(), materials.cpu, materials.drivers.timer
        )
        self._trouble = trouble

    def prepare(self, workload: Workload) -> "Troublesome.Runner":
        return self.Runner(self._kernel.prepare(workload), self._trouble)

    class Runner:
        def __init__(self, kernel: KernelRunner, trouble: Callable[[], object]) -> None:
            self._kernel = kernel
            self._trouble = trouble
            self.packed_weight_bytes = kernel.packed_weight_bytes
            self.packs_each_copy = False
            self.pack = kernel.pack

        def sample(
            self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
        ) -> SampleStruct:
            if warm_up_calls > 0:  # which the check does without
                self._trouble()
            return self._kernel.sample(
                weights, warm_up_calls=warm_up_calls, timed_calls=timed_calls
            )


def _add_row(
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[], object],
    kind: type[Troublesome] = Troublesome,
) -> None:
    """Let there be a library `troublesome`."""

    def find(materials: Materials) -> list[Copy]:
        return [Copy(package="troublesome 1", baseline=kind(materials, trouble))]

    rows = (Row(name="troublesome", place=0, find=find), *baseline_rows())
    monkeypatch.setattr(session, "baseline_rows", lambda: rows)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _refuse() -> None:
    raise BaselineMissing("it has had enough; choose another baseline.")


def _break() -> None:
    raise KeyError(1)


@pytest.mark.parametrize(
    ("trouble", "word"),
    [(_crash, "SIGSEGV"), (_refuse, "had enough"), (_break, "KeyError")],
)
def test_baseline_that_fails_while_it_is_timed_is_left_out(
    toolchain: Toolchain,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[], object],
    word: str,
) -> None:
    _add_row(monkeypatch, trouble)
    owner, other = Pipe()
    with owner, other:
        trials = _session(toolchain, owner, baselines=("troublesome", "scalar"))
        (found,) = trials.time(_request(build_planted(toolchain)))

    assert len(trials.opening.baselines[Regime.HOT].texts) == 2
    assert [measurement.baseline.split()[0] for measurement in found.measurements] == ["scalar"]
    assert list(found.left_out) == ["troublesome"]
    assert word in found.left_out["troublesome"]


@pytest.mark.parametrize("most", [1, 3])
def test_baseline_that_cannot_rotate_over_weights_is_left_out_of_the_cold_regime(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(Troublesome, "most_weight_copies", most)
    _add_row(monkeypatch, lambda: None)
    owner, other = Pipe()
    with owner, other:
        names = ("troublesome", "scalar")
        trials = _session(toolchain, owner, baselines=names, regimes=tuple(Regime))
        found = {
            regime: trials.time(_request(build_planted(toolchain), regime=regime))[0]
            for regime in Regime
        }

    assert len(found[Regime.HOT].measurements) == 2
    cold = found[Regime.COLD_WEIGHTS]
    if most > 1:
        beside, _scalar = cold.measurements
        assert beside.baseline_timing.calls_per_sample <= most - 1  # none is read twice
        return
    assert len(cold.measurements) == 1
    assert "copies of the weights" in cold.left_out["troublesome"]


def test_each_regime_has_the_baseline_that_is_fastest_in_it(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(text: str) -> Row:
        def find(materials: Materials) -> list[Copy]:
            library = Troublesome(materials, lambda: None)
            library.text = text
            return [Copy(package=text, baseline=library)]

        return Row(name=text, place=0, find=find, is_raced=True)

    made: list[object] = []

    def push(*_given: object) -> object:
        made.append(object())
        return made[-1]

    def learn(
        baseline: Baseline, *_given: object, pushing: object | None, **_named: object
    ) -> Checked:
        regime = Regime.HOT if pushing is None else Regime.COLD_WEIGHTS
        times_s = {("near", Regime.HOT): 1e-6, ("far", Regime.COLD_WEIGHTS): 2e-6}
        return Checked(
            text=baseline.text,
            implementation="loops",
            call_s=times_s.get((baseline.text, regime), 1e-5),
            choice={},
            is_quiet=False,
        )

    monkeypatch.setattr(session, "baseline_rows", lambda: (row("near"), row("far")))
    monkeypatch.setattr(session, "learn_of_baseline", learn)
    monkeypatch.setattr(session, "Pushing", push)
    owner, other = Pipe()
    with owner, other:
        trials = _session(toolchain, owner, baselines=("auto",), regimes=tuple(Regime))
        found = {
            regime: trials.time(_request(build_planted(toolchain), regime=regime))[0].measurement
            for regime in Regime
        }

    assert len(made) == 1  # what all libraries of the race are pushed out by
    measured = {regime: one and one.baseline for regime, one in found.items()}
    assert measured == {Regime.HOT: "near", Regime.COLD_WEIGHTS: "far"}
    for regime, baselines in trials.opening.baselines.items():
        assert baselines.text == measured[regime]
        assert {one.regime for one in baselines.raced} == {regime}
    assert [one.call_ns for one in trials.opening.baselines[Regime.COLD_WEIGHTS].raced] == [
        pytest.approx(2000.0),
        pytest.approx(10_000.0),
    ]


class BadAtEpilogues(Troublesome):
    """The scalar kernel, as a library that has only a reference implementation of an epilogue."""

    text = "reference 1"

    def prepare(self, workload: Workload) -> Troublesome.Runner:
        """Return a runner that is right, and says that it takes a thousand times as long."""
        if not workload.problem.epilogue.steps:
            return Plain(self._kernel.prepare(with_epilogue(workload)), lambda: None)
        return Slow(self._kernel.prepare(workload), lambda: None)


class Plain(Troublesome.Runner):
    """What the library takes without an epilogue."""


class Slow(Troublesome.Runner):
    """What it takes with one."""

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        sample = super().sample(weights, warm_up_calls=warm_up_calls, timed_calls=timed_calls)
        return SampleStruct(1000 * sample.elapsed_ns, sample.involuntary_switches)


def with_epilogue(workload: Workload) -> Workload:
    """Return a workload for the kernel at hand, which was built for an epilogue."""
    operands = {
        operand.name: np.zeros(PROBLEM.n, np.float32) for operand in PROBLEM.epilogue.operands
    }
    return replace(workload, problem=PROBLEM, operands=operands)


def test_a_baseline_that_an_epilogue_slows_beyond_reason_is_not_believed(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add_row(monkeypatch, lambda: None, BadAtEpilogues)
    owner, other = Pipe()
    with owner, other:
        trials = _session(toolchain, owner, baselines=("troublesome", "scalar"))
        (found,) = trials.time(_request(build_planted(toolchain), checks_large_ratios=True))

    slow, fair = found.measurements
    assert why_implausible(fair) is None
    assert fair.limits is not None
    assert fair.limits.plain_ns is None
    assert fair.limits.least_ns > 0.0
    reason = why_implausible(slow)
    assert reason is not None
    assert "reference 1 takes" in reason
    assert "without the epilogue: this baseline is not one that a user would accept" in reason


def test_a_slow_kernel_of_our_own_is_not_called_without_its_operands(toolchain: Toolchain) -> None:
    slow = RIGHT + 'for (int spin = 0; spin < 100000; spin++) __asm__ volatile("");'
    owner, other = Pipe()
    with owner, other:
        trials = _session(toolchain, owner, slow)
        (found,) = trials.time(_request(build_planted(toolchain), checks_large_ratios=True))

    assert found.measurement is not None
    assert found.measurement.ratio.median > LARGE_RATIO
    assert found.measurement.limits is not None
    assert found.measurement.limits.plain_ns is None
