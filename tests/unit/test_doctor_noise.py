"""The noise score: what it says of samples, and of those of earlier checks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples import CPU

from gemm_tuner.doctor.fastest import over_fastest
from gemm_tuner.doctor.loops import Loop, block_bytes, plain_loops
from gemm_tuner.doctor.noise import LIMITS, Samples, Watch, check_noise, watch
from gemm_tuner.domain.check import Level
from gemm_tuner.machine.system import SystemFiles

CALM = (100,) * 100


def samples(loop: str, *times_ns: int, identity: str = "any") -> Samples:
    return Samples(loop=loop, identity=identity, times_ns=times_ns)


def seen(arithmetic: tuple[int, ...], reads: tuple[int, ...]) -> Watch:
    return Watch(
        samples=(samples("arithmetic", *arithmetic), samples("reads", *reads)),
        size_bytes=1 << 20,
        use=None,
        waited=None,
    )


def test_the_score_is_the_95th_percentile_over_the_minimum() -> None:
    assert samples("reads", *range(100, 200)).score == pytest.approx(194 / 100)
    assert samples("reads", *CALM).score == 1.0


@pytest.mark.parametrize(
    ("arithmetic", "reads", "level"),
    [
        (CALM, CALM, Level.OK),
        ((*CALM, 900), CALM, Level.OK),  # one in a hundred
        ((*CALM, *(115,) * 20), CALM, Level.NOTE),
        ((*CALM, *(140,) * 20), CALM, Level.PROBLEM),
        (CALM, (*CALM, *(115,) * 20), Level.OK),  # what reads do on a calm machine
        (CALM, (*CALM, *(130,) * 20), Level.NOTE),
        (CALM, (*CALM, *(200,) * 20), Level.PROBLEM),
    ],
)
def test_uneven_samples_are_noise(
    arithmetic: tuple[int, ...], reads: tuple[int, ...], level: Level
) -> None:
    check = check_noise(seen(arithmetic, reads), {})

    assert check.level is level
    assert bool(check.advice) is (level is not Level.OK)
    assert check.figures["arithmetic_median_over_fastest_known"] is None


@pytest.mark.parametrize(
    ("factor", "level"), [(1.0, Level.OK), (1.3, Level.NOTE), (1.9, Level.PROBLEM)]
)
def test_a_neighbour_that_never_rests_shows_beside_earlier_checks(
    factor: float, level: Level
) -> None:
    check = check_noise(seen(CALM, CALM), {"reads": factor})

    assert check.level is level
    assert (f"its median {factor:.2f} times the fastest of earlier checks" in check.seen) is (
        factor > 1
    )


def test_the_fastest_samples_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "fastest.json"

    assert over_fastest(path, CPU, [samples("reads", 120, 130, 120)]) == {}
    assert over_fastest(path, CPU, [samples("reads", 150, 180, 190)]) == {"reads": 1.5}
    assert over_fastest(path, CPU, [samples("reads", 60, 60, 70)]) == {"reads": 0.5}
    assert over_fastest(path, CPU, [samples("reads", 120)]) == {"reads": 2.0}
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_work_or_another_cpu_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "fastest.json"
    over_fastest(path, CPU, [samples("reads", 120)])

    assert over_fastest(path, CPU, [samples("reads", 300, identity="other")]) == {}
    assert over_fastest(path, replace(CPU, stepping=9), [samples("reads", 300)]) == {}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", json.dumps({"x": "y", "z": -1, "u": None}), "9" * 70_000]
)
def test_a_damaged_file_is_as_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "fastest.json"
    path.write_text(content)
    path.chmod(0o600)

    assert over_fastest(path, CPU, [samples("reads", 120)]) == {}
    assert over_fastest(path, CPU, [samples("reads", 240)]) == {"reads": 2.0}


def test_a_folder_that_cannot_be_made_is_not_an_error() -> None:
    assert over_fastest(Path("/proc/none/fastest.json"), CPU, [samples("reads", 120)]) == {}


def test_the_loops_take_turns_and_the_use_of_cpus_is_noted(tmp_path: Path) -> None:
    moments = iter(range(10_000))
    turns: list[str] = []

    def loop(name: str, time_ns: int) -> Loop:
        def run() -> int:
            turns.append(name)
            return time_ns

        return Loop(name=name, identity=name, run=run)

    told: list[float] = []
    found = watch(
        [loop("arithmetic", 7), loop("reads", 9)],
        size_bytes=64,
        files=SystemFiles(tmp_path),
        usable={0},
        ticks_per_s=100,
        tell=told.append,
        seconds=30,
        clock=lambda: next(moments),
    )

    assert turns[:4] == ["arithmetic", "reads"] * 2
    assert {one.loop: set(one.times_ns) for one in found.samples} == {
        "arithmetic": {7},
        "reads": {9},
    }
    assert len(found.samples[0].times_ns) == len(told) == 29
    assert (found.use, found.waited) == (None, None)


def test_a_slow_loop_has_enough_samples(tmp_path: Path) -> None:
    moments = iter(range(0, 1_000_000, 100))

    found = watch(
        [Loop(name="reads", identity="reads", run=lambda: 5)],
        size_bytes=64,
        files=SystemFiles(tmp_path),
        usable={0},
        ticks_per_s=100,
        tell=lambda _s: None,
        seconds=1,
        clock=lambda: next(moments),
    )

    assert len(found.samples[0].times_ns) == 20


def test_loops_without_a_compiler_take_time() -> None:
    arithmetic, reads = plain_loops(1 << 20)

    assert (arithmetic.name, reads.name) == tuple(LIMITS)
    assert arithmetic.run() > 0
    assert reads.run() > 0


@pytest.mark.parametrize(
    ("l3_mib", "available_mib", "expected_mib"),
    [(32, 10_000, 128), (0, None, 128), (512, 100_000, 1024), (32, 200, 50)],
)
def test_the_block_is_beyond_l3_where_memory_allows(
    l3_mib: int, available_mib: int | None, expected_mib: int
) -> None:
    cpu = replace(CPU, caches=replace(CPU.caches, l3_bytes=l3_mib << 20))
    available = None if available_mib is None else available_mib << 20

    assert block_bytes(cpu, available) == expected_mib << 20
