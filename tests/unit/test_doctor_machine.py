"""What the doctor says of a machine, whose files are those of a folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from samples import CPU

from gemm_tuner.doctor import clock, features, load, pages, processors
from gemm_tuner.doctor.noise import Samples, Watch
from gemm_tuner.domain.check import Level
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.machine.processors import ProcessorUse
from gemm_tuner.machine.system import SystemFiles, cpus_text

FOUR = frozenset(range(4))
CPUS = "sys/devices/system/cpu"
STAT = "cpu0 100 0 0 900 0 0 0 {stolen}\ncpu1 100 0 0 900 0 0 0 {stolen}"
SAPPHIRE_RAPIDS = replace(CPU, vendor="GenuineIntel", family=6, model=143)


def files_of(root: Path, files: Mapping[str, str] | None = None) -> SystemFiles:
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return SystemFiles(root)


def siblings(*lists: str) -> dict[str, str]:
    return {
        f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in enumerate(lists)
    }


def watched(
    *, others: float = 0.0, stolen: float = 0.0, waited: float | None = 0.0, is_told: bool = True
) -> Watch:
    return Watch(
        samples=(Samples(loop="reads", identity="any", times_ns=(1, 1)),),
        size_bytes=1,
        use=ProcessorUse(stolen=stolen, others=others, idle=1.0) if is_told else None,
        waited=waited,
    )


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,5", {0, 1, 2, 5}), ("3", {3}), ("", set()), ("0-", None), ("x", None)]
)
def test_lists_of_cpus_are_read(text: str, cpus: set[int] | None, tmp_path: Path) -> None:
    assert files_of(tmp_path, {"list": text}).cpus("list") == cpus


def test_lists_of_cpus_are_written_as_they_are_read() -> None:
    assert cpus_text(frozenset({0, 1, 2, 5, 8, 9})) == "0-2,5,8-9"


def test_cpus_that_are_switched_off_are_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, {f"{CPUS}/online": "0-3,6", f"{CPUS}/present": "0-7"})

    check = processors.check_cpus(files, FOUR)

    assert check.level is Level.NOTE
    assert check.seen == "4 usable (0-3) of 5 online; offline: 4-5,7"
    assert "cpu4/online" in check.advice


def test_cpus_that_are_all_there_need_nothing(tmp_path: Path) -> None:
    check = processors.check_cpus(files_of(tmp_path, {f"{CPUS}/online": "0-3"}), FOUR)

    assert (check.level, check.advice) == (Level.OK, "")


def test_hyper_threads_are_counted_by_cores(tmp_path: Path) -> None:
    check = processors.check_smt(files_of(tmp_path, siblings("0,2", "1,3", "0,2", "1,3")), FOUR)

    assert check.level is Level.NOTE
    assert check.seen == "CPUs 0,2 share a core, and so in 2 cores"
    assert "at most 2 threads" in check.advice
    assert "taskset -c 0-1 " in check.advice


def test_a_sibling_that_others_use_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, siblings("0,4", "1,5"))

    check = processors.check_smt(files, frozenset({0, 1}))

    assert check.level is Level.NOTE
    assert check.seen.startswith("CPUs 4-5 share cores")


def test_cores_of_one_thread_need_nothing(tmp_path: Path) -> None:
    check = processors.check_smt(files_of(tmp_path, siblings(*"0123")), FOUR)

    assert check.level is Level.OK


@pytest.mark.parametrize(("quota", "level"), [("200000 100000", Level.NOTE), ("max 1", Level.OK)])
def test_the_quota_of_a_container_is_told(quota: str, level: Level, tmp_path: Path) -> None:
    files = files_of(tmp_path, {"sys/fs/cgroup/cpu.max": quota, "proc/self/cgroup": "0::/"})

    check = processors.check_quota(files, FOUR)

    assert check.level is level
    assert (check.figures["quota_cpus"] == 2) is (level is Level.NOTE)


@pytest.mark.parametrize(
    ("mode", "blocks", "level", "advice"),
    [
        ("always [madvise] never", "0 0 0 0 0 0 0 0 0 40 60", Level.OK, ""),
        ("always madvise [never]", "0 0 0 0 0 0 0 0 0 40 60", Level.NOTE, "echo madvise"),
        ("[always] madvise never", "9 9 9 9 9 9 9 9 9 3 1", Level.NOTE, "compact_memory"),
    ],
)
def test_huge_pages_are_counted(
    mode: str, blocks: str, level: Level, advice: str, tmp_path: Path
) -> None:
    files = files_of(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": mode,
            "proc/buddyinfo": f"Node 0, zone   Normal {blocks}",
        },
    )

    check = pages.check_huge_pages(files)

    assert check.level is level
    assert advice in check.advice
    assert check.figures["free_blocks_of_2_mib"] in {160, 5}


@pytest.mark.parametrize(
    ("flags", "release", "seen"),
    [
        ("fpu avx512f", "6.8.0", "the firmware or the kernel does not enable it"),
        ("fpu avx512f hypervisor", "6.8.0", "the hypervisor hides it"),
        ("fpu avx512f hypervisor", "5.10.0-21", "Linux 5.10.0-21 is too old"),
        ("fpu amx_tile", "6.8.0", "the system refuses it: a reason"),
    ],
)
def test_why_amx_is_not_usable(
    flags: str, release: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "ask_for_amx", lambda: "a reason")
    files = files_of(
        tmp_path, {"proc/cpuinfo": f"flags : {flags}", "proc/sys/kernel/osrelease": release}
    )

    check = features.check_amx(files, SAPPHIRE_RAPIDS)

    assert check.level is Level.NOTE
    assert seen in check.seen
    assert check.advice


def test_a_cpu_without_amx_needs_nothing(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"proc/cpuinfo": "flags : fpu"})

    check = features.check_amx(files, CPU)

    assert (check.level, check.advice) == (Level.OK, "")
    assert "this CPU model is not known to have it" in check.seen


def test_amx_that_is_usable_is_said_to_be(tmp_path: Path) -> None:
    usable = replace(SAPPHIRE_RAPIDS, isa=CPU.isa | {IsaFeature.AMX_TILE})

    assert features.check_amx(SystemFiles(tmp_path), usable).figures == {"usable": True}


def test_features_that_a_variable_takes_away_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.check_instructions(CPU).level is Level.OK
    monkeypatch.setenv("GEMM_TUNER_ISA", "avx2,fma")

    check = features.check_instructions(CPU)

    assert check.level is Level.NOTE
    assert "unset GEMM_TUNER_ISA" in check.advice


def test_a_cpu_without_vectors_is_noted() -> None:
    assert features.check_instructions(replace(CPU, isa=frozenset())).level is Level.NOTE


STEADY = clock.Clock(hz=(3.70e9, 3.71e9) * 20)
SLOW = clock.Clock(hz=(1.2e9,) * 20)
CHANGING = clock.Clock(hz=(2.0e9, 3.7e9) * 20)


@pytest.mark.parametrize(
    ("governor", "seen", "level", "told"),
    [
        ("performance", STEADY, Level.OK, "steady within 0.3%"),
        ("powersave", STEADY, Level.NOTE, "governor powersave"),
        ("performance", CHANGING, Level.NOTE, "90 % of samples from 2.00 GHz to 3.70 GHz"),
        (
            "performance",
            clock.Clock(hz=(1.2e9,) * 20),
            Level.NOTE,
            "1.20 GHz measured (0.46 times the nominal one)",
        ),
        ("performance", None, Level.NOTE, "not known: a reason"),
    ],
)
def test_the_clock_is_measured_beside_its_settings(
    governor: str, seen: clock.Clock | None, level: Level, told: str, tmp_path: Path
) -> None:
    files = files_of(
        tmp_path,
        {
            f"{CPUS}/cpu0/cpufreq/scaling_governor": governor,
            f"{CPUS}/cpufreq/boost": "1",
            "proc/cpuinfo": "model name : Some CPU @ 2.60GHz\ncpu MHz : 3700.0",
        },
    )

    check = clock.check_clock(files, 0, seen, "a reason")

    assert check.level is level
    assert told in check.seen
    assert "nominal 2.60 GHz" in check.seen
    assert "boost on" in check.seen
    assert ("cpupower" in check.advice) is (governor == "powersave")


def test_the_nominal_clock_is_not_that_of_the_moment(tmp_path: Path) -> None:
    files = files_of(
        tmp_path,
        {"proc/cpuinfo": "model name : X\ncpu MHz : 1234.5", f"{CPUS}/cpu0/cpufreq/any": ""},
    )

    assert clock.check_clock(files, 0, STEADY, "").figures["nominal_hz"] is None
    assert clock.check_clock(files, 1, STEADY, "").figures["nominal_hz"] == 1234.5e6


def test_interrupted_samples_tell_no_clock() -> None:
    moments = iter(range(1000))

    seen = clock.watch_clock(
        lambda: (1e9, True), tell=lambda _s: None, seconds=50, clock=lambda: next(moments)
    )

    assert seen is None


@pytest.mark.parametrize(
    ("now", "since_start", "level"),
    [(0.0, 0, Level.OK), (0.2, 0, Level.PROBLEM), (0.02, 0, Level.NOTE), (0.0, 200, Level.NOTE)],
)
def test_time_that_the_hypervisor_takes_is_told(
    now: float, since_start: int, level: Level, tmp_path: Path
) -> None:
    files = files_of(tmp_path, {"proc/stat": STAT.format(stolen=since_start)})

    check = load.check_steal(files, {0, 1}, watched(stolen=now))

    assert check.level is level
    assert bool(check.advice) is (level is not Level.OK)


@pytest.mark.parametrize(
    ("others", "waited", "level"),
    [
        (0.1, 0.0, Level.OK),
        (1.0, 0.0, Level.NOTE),
        (2.0, 0.3, Level.PROBLEM),
        (0.1, None, Level.OK),
    ],
)
def test_other_work_is_told(
    others: float, waited: float | None, level: Level, tmp_path: Path
) -> None:
    files = files_of(tmp_path, {"proc/loadavg": "1.00 0.50 0.25 3/97 15777"})

    check = load.check_load(files, {0, 1}, watched(others=others, waited=waited))

    assert check.level is level
    assert f"other work kept {others:.1f} of 2 CPUs busy" in check.seen
    assert "load 1.00 0.50 0.25, 3 threads ready to run" in check.seen


def test_a_machine_without_these_files_is_not_known(tmp_path: Path) -> None:
    files, unseen = SystemFiles(tmp_path / "missing"), watched(waited=None, is_told=False)
    checks = [
        processors.check_cpus(files, FOUR),
        processors.check_smt(files, FOUR),
        processors.check_quota(files, FOUR),
        pages.check_huge_pages(files),
        features.check_amx(files, CPU),
        clock.check_clock(files, 0, None, "there is no compiler"),
        load.check_steal(files, FOUR, unseen),
        load.check_load(files, FOUR, unseen),
    ]

    assert {check.level for check in checks} == {Level.NOTE}
    assert all("not known: " in check.seen for check in checks)


def test_a_lock_that_nobody_holds_is_free_and_kept_so(tmp_path: Path) -> None:
    lock, files = MeasuringLock(tmp_path / "lock"), SystemFiles(tmp_path)

    with load.shared_lock(files, lock.path) as check:
        assert check.seen.startswith("free: no worker")
    assert not lock.path.exists()
    assert lock.acquire()
    lock.release()
    with load.shared_lock(files, lock.path) as check:
        assert (check.level, check.seen) == (Level.OK, "free")
        assert not lock.acquire(), "a worker would be measured beside"
    assert lock.acquire()
    lock.release()


def test_who_holds_the_lock_is_named(tmp_path: Path) -> None:
    held = MeasuringLock(tmp_path / "lock")
    assert held.acquire()
    inode = held.path.stat().st_ino
    files = files_of(
        tmp_path,
        {
            "proc/locks": f"1: POSIX ADVISORY READ 1 fe:00:{inode} 0 EOF\n"
            f"2: FLOCK  ADVISORY  WRITE 4711 fe:00:{inode} 0 EOF",
            "proc/4711/comm": "gemm-tuner",
        },
    )

    with load.shared_lock(files, held.path) as check:
        pass
    with load.shared_lock(SystemFiles(tmp_path / "missing"), held.path) as unnamed:
        pass
    held.release()

    assert check.level is Level.NOTE
    assert load.is_held(check)
    assert check.seen == "held by process 4711 (gemm-tuner), which measures now"
    assert "a process that the system does not name" in unnamed.seen


def test_a_lock_that_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    link = tmp_path / "lock"
    link.symlink_to(tmp_path / "elsewhere")

    with load.shared_lock(SystemFiles(tmp_path), link) as check:
        assert check.seen.startswith("not known: ")
        assert not load.is_held(check)
