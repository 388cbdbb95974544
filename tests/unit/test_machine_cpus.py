import os
from pathlib import Path

import pytest

from gemm_tuner.machine.cpus import quota_cpus, usable_cpus


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_more_cpus_are_usable_than_may_run_threads() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("", None), ("? ?", None)],
)
def test_quota_of_version_2_is_read(tmp_path: Path, quota: str, cpus: int | None) -> None:
    _write(tmp_path / "cpu.max", quota)
    _write(tmp_path / "membership", "0::/")

    assert quota_cpus(tmp_path, tmp_path / "membership") == cpus


def test_least_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    _write(tmp_path / "outer" / "cpu.max", "200000 100000")
    _write(tmp_path / "outer" / "inner" / "cpu.max", "800000 100000")
    _write(tmp_path / "membership", "0::/outer/inner")

    assert quota_cpus(tmp_path, tmp_path / "membership") == 2


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", None)])
def test_quota_of_version_1_is_read(tmp_path: Path, quota: str, cpus: int | None) -> None:
    group = tmp_path / "cpu" / "container"
    _write(group / "cpu.cfs_quota_us", quota)
    _write(group / "cpu.cfs_period_us", "100000")
    _write(tmp_path / "membership", "4:memory:/container\n3:cpu,cpuacct:/container\n")

    assert quota_cpus(tmp_path, tmp_path / "membership") == cpus


def test_group_that_is_not_mounted_leaves_what_is(tmp_path: Path) -> None:
    _write(tmp_path / "cpu.max", "100000 100000")
    _write(tmp_path / "membership", "0::/elsewhere/container")

    assert quota_cpus(tmp_path, tmp_path / "membership") == 1


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_cpus(tmp_path, tmp_path / "membership") is None
