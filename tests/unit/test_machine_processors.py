"""What is read from the system about the use of its processors."""

from dataclasses import replace
from pathlib import Path

import pytest

from gemm_tuner.machine.processors import (
    ProcessorTimes,
    processor_use,
    read_processor_times,
    thread_wait_ns,
)

STAT = """cpu  100 0 100 1000 100 0 0 30 0 0
cpu0 10 1 20 300 40 5 6 7 8 9
cpu1 10 1 20 300 40 5 6 7 8 9
cpu2 999 999 999 999 999 999 999 999 999 999
intr 12345
"""
BEGIN = ProcessorTimes(idle=1000, stolen=10, total=5000, own_s=1.0)


def test_times_are_of_the_processors_that_may_be_used(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)

    times = read_processor_times([0, 1], stat)

    assert (times.idle, times.stolen, times.total) == (680, 14, 2 * 389)


def test_a_system_that_tells_nothing_has_no_use(tmp_path: Path) -> None:
    nothing = read_processor_times([0], tmp_path / "missing")

    assert nothing.total == 0
    assert processor_use(nothing, nothing, cpus=1, ticks_per_s=100) is None


def test_what_is_neither_idle_nor_own_nor_stolen_is_others() -> None:
    # Two processors for a second: one of them ours, half of the other is idle.
    end = ProcessorTimes(idle=1050, stolen=30, total=5200, own_s=2.0)

    use = processor_use(BEGIN, end, cpus=2, ticks_per_s=100)

    assert use is not None
    assert use.stolen == pytest.approx(0.1)
    assert use.others == pytest.approx(0.3)
    assert use.idle == pytest.approx(0.5)


def test_a_single_tick_is_not_a_stolen_share() -> None:
    end = replace(BEGIN, stolen=11, total=BEGIN.total + 20)

    use = processor_use(BEGIN, end, cpus=2, ticks_per_s=100)

    assert use is not None
    assert use.stolen == 0.0


def test_waits_of_all_threads_are_added(tmp_path: Path) -> None:
    for task, waited_ns in {"11": 500, "12": 70}.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(f"123 {waited_ns} 4\n")
    (tmp_path / "13").mkdir()  # it has just ended

    assert thread_wait_ns(tmp_path) == 570
    assert thread_wait_ns(tmp_path / "missing") == 0
