"""A trial host that verifies several builds at the same time."""

from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from planted import PROBLEM, build_planted

from gemm_tuner.bench import session
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import TrialFailed
from gemm_tuner.machine import available_memory

CRASH = "__builtin_trap();"
HANG = 'for (;;) __asm__ volatile("");'


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.mark.proof
def test_several_builds_are_verified_at_the_same_time(toolchain: Toolchain) -> None:
    """One that hangs keeps nobody waiting, and one that crashes ends nothing but its own trial."""
    hanging = build_planted(toolchain, HANG)
    crashing = build_planted(toolchain, CRASH)
    right = build_planted(toolchain)
    with (
        TrialHost(
            PROBLEM,
            threads=1,
            baseline="scalar",
            toolchain=toolchain,
            seed=3,
            scalar_build=lambda: right,
            provers=2,
        ) as host,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        asked = [pool.submit(host.verify, build) for build in (hanging, crashing, right)]
        ended = [finding.result().outcome for finding in as_completed(asked)]

    assert ended == [Outcome.CRASHED, Outcome.CORRECT, Outcome.HUNG]


@pytest.mark.parametrize(("available_gib", "provers"), [(100, 8), (24, 3), (12, 1)])
def test_fewer_builds_are_verified_at_the_same_time_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, available_gib: int, provers: int
) -> None:
    """One alone takes 10.4 GiB, and each other half as much."""
    for module in (session, available_memory):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: available_gib << 30)

    assert session._provers_that_fit(Problem.parse("f32 2048x50257x768 nk none"), 8) == provers


def test_a_host_that_is_closed_ends_what_its_threads_wait_for(toolchain: Toolchain) -> None:
    hanging = build_planted(toolchain, HANG)
    with ThreadPoolExecutor(max_workers=2) as pool:
        with TrialHost(
            PROBLEM,
            threads=1,
            baseline="scalar",
            toolchain=toolchain,
            seed=3,
            scalar_build=lambda: build_planted(toolchain),
            stall_timeout_s=600.0,
            provers=2,
        ) as host:
            asked = [pool.submit(host.verify, hanging) for _thread in range(2)]
        failures = [finding.exception(timeout=60) for finding in asked]

    assert all(isinstance(failure, TrialFailed) for failure in failures)
