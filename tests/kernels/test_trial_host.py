from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from os import strerror

import pytest
from planted import PROBLEM, RIGHT, build_planted

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import (
    BaselineMissing,
    CompilationFailed,
    InvalidSetting,
    NotEnoughMemory,
    TrialFailed,
)
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel

CRASH = "__builtin_trap();"
WILD = "*reinterpret_cast<volatile float *>(16) = sum;"
SLOW = RIGHT + 'for (int spin = 0; spin < 1000; spin++) __asm__ volatile("");'
HANG = 'for (;;) __asm__ volatile("");'
# What the system does when memory runs out, here by two system calls: getpid, and kill with 9.
KILL = """
long number = 39, process;
__asm__ volatile("syscall" : "=a"(process) : "a"(number) : "rcx", "r11", "memory");
number = 62;
__asm__ volatile("syscall" : "+a"(number) : "D"(process), "S"(9L) : "rcx", "r11", "memory");
"""
TIMING_PAIRS = 5
SAMPLE_NS = 20_000

# What a bad candidate does for each element, its outcome and a word of the detail.
PLANTED = {
    "illegal instruction": (CRASH, Outcome.CRASHED, "SIGILL"),
    "wild pointer": (WILD, Outcome.CRASHED, "SIGSEGV"),
    "killed by the system": (
        KILL,
        Outcome.HUNG,
        "SIGKILL",
    ),
    "write after y": (RIGHT + "y[(m - 1) * ldy + N] = 0;", Outcome.OUT_OF_BOUNDS, "after y"),
    "write before y": (RIGHT + "y[-1] = 0;", Outcome.OUT_OF_BOUNDS, "before y"),
    "write after y in its two parts": (
        RIGHT + "if (parts == 2) y[(m - 1) * ldy + N] = 0;",
        Outcome.OUT_OF_BOUNDS,
        "after y",
    ),
    "write before y in one part": (
        RIGHT + "if (parts == 1) y[-1] = 0;",
        Outcome.OUT_OF_BOUNDS,
        "before y",
    ),
    "read after the packed weights in two parts": (
        RIGHT + "if (parts == 2) *const_cast<volatile const float *>(&w[N * K + 15]);",
        Outcome.OUT_OF_BOUNDS,
        "after packed w",
    ),
    "wrong in 64 parts": (
        RIGHT + "if (parts == 64) y[row * ldy + column] += 0.5f;",
        Outcome.WRONG,
        "64 parts",
    ),
    "write between rows": (
        RIGHT + "if (row + 1 < m && ldy > N) y[row * ldy + N] = 0;",
        Outcome.OUT_OF_BOUNDS,
        "between the rows of y",
    ),
    "read after x": (
        RIGHT + "y[row * ldy + column] += 0 * x[(m - 1) * ldx + K];",
        Outcome.OUT_OF_BOUNDS,
        "after x",
    ),
    "read after bias": (
        RIGHT + "*const_cast<volatile const float *>(&bias[N]);",
        Outcome.OUT_OF_BOUNDS,
        "after bias",
    ),
    "write to x": (
        RIGHT + "const_cast<float *>(x)[0] = 0;",
        Outcome.OUT_OF_BOUNDS,
        "x, which is an input",
    ),
    "wrong element": (
        RIGHT + "if (row == 4 && column == 6) y[row * ldy + column] += 0.001f;",
        Outcome.WRONG,
        "y[4, 6]",
    ),
    "missing element": (
        "if (row != 2 || column != 3) { " + RIGHT + "}",
        Outcome.WRONG,
        "y[2, 3]",
    ),
    "second product of a batch": (
        RIGHT + "if (item == 1 && row == 2) y[row * ldy + column] += 0.5f;",
        Outcome.WRONG,
        "y[7, ",
    ),
    "lost nan": (
        "y[row * ldy + column] = sum > 0 ? sum : 0;",
        Outcome.WRONG,
        "nan",
    ),
    "order of parts": (
        RIGHT + "static int last; if (row == 0 && column == 0) y[0] += last == 71 ? 1e-7f : 0;"
        " last = 10 * parts + part;",
        Outcome.WRONG,
        "order",
    ),
    "refusal": ("return GEMM_TUNER_BAD_ARGS;", Outcome.WRONG, "returned 1"),
}


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.fixture(scope="module")
def host(toolchain: Toolchain) -> Iterator[TrialHost]:
    with TrialHost(
        PROBLEM,
        threads=1,
        baseline="scalar",
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build_planted(toolchain),
        stall_timeout_s=4.0,
        races=[Race(regime=regime) for regime in Regime],
    ) as host:
        yield host


def test_right_kernel_is_correct(host: TrialHost, toolchain: Toolchain) -> None:
    finding = host.verify(build_planted(toolchain))

    assert finding.outcome is Outcome.CORRECT
    assert finding.detail == ""


@pytest.mark.parametrize("name", PLANTED)
def test_bad_candidate_has_its_outcome_and_the_host_goes_on(
    host: TrialHost, toolchain: Toolchain, name: str
) -> None:
    statement, outcome, word = PLANTED[name]

    finding = host.verify(build_planted(toolchain, statement))

    assert finding.outcome is outcome, finding.detail
    assert word in finding.detail
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


def test_every_height_of_a_last_tile_is_checked(toolchain: Toolchain) -> None:
    problem = Problem.parse("f32 1..64x7x3 nk bias+relu")
    with TrialHost(
        problem,
        threads=1,
        baseline="scalar",
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build_planted(toolchain),
    ) as host:
        finding = host.verify(build_planted(toolchain, f"if (m != 3) {{ {RIGHT} }}"))

    assert finding.outcome is Outcome.WRONG
    assert "m = 3" in finding.detail


def test_hanging_candidate_is_ended(host: TrialHost, toolchain: Toolchain) -> None:
    finding = host.verify(build_planted(toolchain, HANG))

    assert finding.outcome is Outcome.HUNG
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


def test_artifact_that_cannot_be_loaded_has_its_outcome(
    host: TrialHost, toolchain: Toolchain
) -> None:
    build = build_planted(toolchain)

    other_bytes = host.verify(replace(build, binary=build.binary + b"\0"))
    other_abi = host.verify(build_planted(toolchain, abi=ABI_VERSION + 1))

    assert other_bytes.outcome is Outcome.LOAD_FAILED
    assert "sha256" in other_bytes.detail
    assert other_abi.outcome is Outcome.LOAD_FAILED
    assert f"version {ABI_VERSION + 1}" in other_abi.detail


@pytest.mark.isa("avx2", "fma")
def test_a_build_for_another_cpu_is_verified_by_emulation_and_not_timed(
    host: TrialHost, toolchain: Toolchain
) -> None:
    needed = frozenset({IsaFeature.AMX_TILE, IsaFeature.AMX_INT8})
    if needed & detect_cpu().isa:
        pytest.skip("this CPU has AMX")
    build = build_planted(toolchain)
    build = replace(build, artifact=replace(build.artifact, required_isa=needed))

    finding = host.verify(build)
    timed = host.time(build, context=ExecutionContext(), pairs=1, sample_ns=SAMPLE_NS)

    assert finding.outcome is Outcome.CORRECT
    assert finding.emulated == needed
    assert timed.finding.outcome is Outcome.LOAD_FAILED
    assert "amx_int8,amx_tile, which this CPU lacks" in timed.finding.detail
    assert timed.measurement is None


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("regime", list(Regime))
def test_timing_pairs_a_build_with_the_baseline_and_with_reading_where_it_is_asked_for(
    host: TrialHost, toolchain: Toolchain, regime: Regime, *, reads: bool
) -> None:
    found = host.time(
        build_planted(toolchain),
        context=ExecutionContext(regime=regime),
        pairs=TIMING_PAIRS,
        sample_ns=SAMPLE_NS,
        reads=reads,
    )

    assert found.measurement is not None
    assert found.measurement.baseline == host.baselines().text
    # Fewer where the system interrupted rounds.
    assert TIMING_PAIRS / 2 <= len(found.measurement.candidate.samples_ns) <= TIMING_PAIRS
    assert found.conditions is not None
    assert found.conditions.peak_flop_per_s > 1e8
    assert (found.roofline is not None) == reads
    if found.roofline is not None:
        # No slower than a scalar kernel, which reads and multiplies as much; the least of its
        # samples, since other tests run beside this one.
        assert 0 < found.roofline.minimum_ns < found.measurement.baseline_timing.median_ns


def test_a_death_among_builds_that_are_timed_together_leaves_the_others(
    host: TrialHost, toolchain: Toolchain
) -> None:
    right, slow = build_planted(toolchain), build_planted(toolchain, SLOW)
    builds = [right, build_planted(toolchain, CRASH), slow]

    found = host.time_together(
        builds, context=ExecutionContext(), pairs=TIMING_PAIRS, sample_ns=SAMPLE_NS
    )

    outcomes = [one.finding.outcome for one in found]
    assert outcomes == [Outcome.CORRECT, Outcome.CRASHED, Outcome.CORRECT]
    fast, slow_one = (one.measurement for one in found if one.measurement)
    assert fast.ratio.median > 2 * slow_one.ratio.median
    assert len(fast.candidate.samples_ns) > len(slow_one.candidate.samples_ns)


@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        (CRASH, Outcome.CRASHED),
        pytest.param(HANG, Outcome.HUNG, marks=pytest.mark.proof),
    ],
)
def test_death_during_timing_ends_only_its_own_trial(
    host: TrialHost, toolchain: Toolchain, statement: str, outcome: Outcome
) -> None:
    found = [
        host.time(build, context=ExecutionContext(), pairs=TIMING_PAIRS, sample_ns=SAMPLE_NS)
        for build in (build_planted(toolchain, statement), build_planted(toolchain))
    ]

    assert [item.finding.outcome for item in found] == [outcome, Outcome.CORRECT]
    assert [item.measurement is None for item in found] == [True, False]


def test_the_scalar_loop_is_built_once_and_only_where_it_is_a_baseline(
    toolchain: Toolchain,
) -> None:
    build = build_planted(toolchain)
    asked: list[str] = []

    def scalar_build() -> Build:
        asked.append("scalar")
        return build

    for baseline in (("one-thread",), ("scalar", "one-thread")):
        with TrialHost(
            PROBLEM,
            threads=1,
            baseline=baseline,
            toolchain=toolchain,
            seed=3,
            scalar_build=scalar_build,
            one_thread_build=build,
            races=[Race(regime=regime) for regime in Regime],
        ) as host:
            assert len(host.baselines().texts) == len(baseline)
        assert asked == [one for one in baseline if one == "scalar"]


def test_a_scalar_loop_that_is_not_compiled_ends_the_host(toolchain: Toolchain) -> None:
    def scalar_build() -> Build:
        raise CompilationFailed("no space left on device")

    with pytest.raises(CompilationFailed, match="no space left"):
        TrialHost(
            PROBLEM,
            threads=1,
            baseline="scalar",
            toolchain=toolchain,
            seed=3,
            scalar_build=scalar_build,
        )


def test_timing_with_two_threads(toolchain: Toolchain) -> None:
    build = build_planted(toolchain)
    with TrialHost(
        PROBLEM,
        threads=2,
        baseline="scalar",
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build,
    ) as host:
        found = host.time(build, context=ExecutionContext(threads=2), pairs=2, sample_ns=SAMPLE_NS)

    assert found.measurement is not None


def test_two_threads_are_timed_beside_the_kernel_of_one(toolchain: Toolchain) -> None:
    build = build_planted(toolchain)
    with TrialHost(
        PROBLEM,
        threads=2,
        baseline=("scalar", "one-thread"),
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build,
        one_thread_build=build,
    ) as host:
        found = host.time(build, context=ExecutionContext(threads=2), pairs=2, sample_ns=SAMPLE_NS)

    assert [one.baseline.split()[0] for one in found.measurements] == ["scalar", "one-thread"]


def test_other_number_of_threads_is_refused(host: TrialHost, toolchain: Toolchain) -> None:
    with pytest.raises(InvalidSetting, match="threads = 2"):
        host.time(
            build_planted(toolchain),
            context=ExecutionContext(threads=2),
            pairs=1,
            sample_ns=SAMPLE_NS,
        )


def test_unknown_baseline_is_refused(toolchain: Toolchain) -> None:
    with pytest.raises(InvalidSetting, match="blas"):
        TrialHost(
            PROBLEM,
            threads=1,
            baseline="blas",
            toolchain=toolchain,
            seed=0,
            scalar_build=lambda: build_planted(toolchain),
        )


def test_wrong_baseline_is_refused(toolchain: Toolchain) -> None:
    wrong = build_planted(toolchain, "y[row * ldy + column] = 1;")

    with pytest.raises(BaselineMissing, match="wrong"):
        TrialHost(
            PROBLEM,
            threads=1,
            baseline="scalar",
            toolchain=toolchain,
            seed=0,
            scalar_build=lambda: wrong,
        )


def test_problem_larger_than_the_memory_is_refused(toolchain: Toolchain) -> None:
    huge = Problem.create(500_000, 500_000, 8)

    with pytest.raises(NotEnoughMemory, match="GiB"):
        TrialHost(
            huge,
            threads=1,
            toolchain=toolchain,
            seed=0,
            scalar_build=lambda: build_planted(toolchain),
        )


def test_a_server_that_finds_no_room_is_a_failed_trial(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_prefix: str) -> None:
        raise OSError(ENOSPC, strerror(ENOSPC))

    monkeypatch.setattr("gemm_tuner.bench.isolate.scratch_folder", full)

    with pytest.raises(TrialFailed, match="No space left"):
        TrialHost(
            PROBLEM,
            threads=1,
            baseline="scalar",
            toolchain=toolchain,
            seed=0,
            scalar_build=lambda: build_planted(toolchain),
        )


def test_measurements_beside_several_baselines_share_their_rounds(toolchain: Toolchain) -> None:
    with TrialHost(
        PROBLEM,
        threads=1,
        baseline=("scalar", "openblas"),
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build_planted(toolchain),
    ) as host:
        found = host.time(
            build_planted(toolchain),
            context=ExecutionContext(),
            pairs=TIMING_PAIRS,
            sample_ns=SAMPLE_NS,
        )

    candidates = {measurement.candidate for measurement in found.measurements}
    assert len(found.measurements) + len(host.baselines().left_out) == 2
    assert len(candidates) == 1


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_kernel_is_timed_in_the_parts_it_prefers(toolchain: Toolchain, threads: int) -> None:
    build = build_planted(toolchain, "y[row * ldy + column] = parts == 2 ? 10 + part : -1;")
    inputs = make_inputs(PROBLEM, InputKind.EXACT, 1)
    workload = make_workload(PROBLEM, inputs, threads=threads)
    timer = build_drivers(toolchain, detect_cpu()).timer
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    runner = KernelRunner(kernel.native, workload, timer)

    runner.sample(WeightCopies(runner, 1, seed=0).struct, warm_up_calls=0, timed_calls=1)

    assert workload.y[:, 0].tolist() == [10, 11, 10, 11, 10]
