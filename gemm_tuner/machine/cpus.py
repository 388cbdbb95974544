"""How many CPUs this process may keep busy: by its affinity and the quota of its control group."""

import os
from math import ceil
from pathlib import Path

from gemm_tuner.domain.units import counted
from gemm_tuner.errors import NotEnoughCpus
from gemm_tuner.machine.system_text import system_text

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many threads of this process can run at the same time, hyper-threads included."""
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, quota_cpus() or cpus))


def check_cpus(threads: int) -> None:
    """Check that so many threads can be timed here: each needs a CPU of its own.

    Raises:
        NotEnoughCpus: this process may use fewer CPUs.
    """
    cpus = usable_cpus()
    if threads > cpus:
        raise NotEnoughCpus(
            f"{threads} threads cannot be timed here, because this process may use "
            f"{counted(cpus, 'CPU')}; run it on a machine with {threads} or more, "
            f"or use --threads {cpus}."
        )


def quota_cpus(mount: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the smallest CPU quota of this process's control groups, in whole CPUs, or None.

    Both versions of control groups are read. In a container, the group that the system tells of may
    be above what is mounted: then the mounted one is the process's own.
    """
    quotas = [
        quota
        for root, group in _hierarchies(mount, system_text(membership))
        for folder in (group, *group.parents)
        if folder.is_relative_to(root)
        for quota in _quotas(folder)
    ]
    return min((ceil(quota) for quota in quotas), default=None)


def _hierarchies(mount: Path, membership: str) -> list[tuple[Path, Path]]:
    """Return the root and this process's group of each hierarchy that may limit CPU time."""
    found = [(mount, mount), (mount / "cpu", mount / "cpu")]
    for line in membership.splitlines():
        _number, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((mount, mount / path.lstrip("/")))
        elif "cpu" in controllers.split(","):
            found.append((mount / "cpu", mount / "cpu" / path.lstrip("/")))
    return found


def _quotas(folder: Path) -> list[float]:
    pairs = (
        system_text(folder / "cpu.max").split(),
        [system_text(folder / "cpu.cfs_quota_us"), system_text(folder / "cpu.cfs_period_us")],
    )
    return [
        int(pair[0]) / int(pair[1])
        for pair in pairs
        if len(pair) == 2 and all(word.isdecimal() and int(word) for word in pair)
    ]
