"""Checks of the CPUs that may be used: which there are, which share a core, and the quota."""

from gemm_tuner.domain.check import Check, Level
from gemm_tuner.machine.cpus import quota_cpus
from gemm_tuner.machine.system import SystemFiles, cpus_text

_CPUS = "sys/devices/system/cpu"
_CGROUPS = "sys/fs/cgroup"


def check_cpus(files: SystemFiles, usable: frozenset[int]) -> Check:
    """Say how many CPUs are usable, and which are switched off."""
    online, present = files.cpus(f"{_CPUS}/online"), files.cpus(f"{_CPUS}/present")
    figures = {"usable": len(usable), "online": len(online) if online else None}
    if not online:
        seen = f"{len(usable)} usable; not known: which are online ({files.path(_CPUS)} is silent)"
        return Check(name="cpus", level=Level.NOTE, seen=seen, figures=figures)
    seen = f"{len(usable)} usable ({cpus_text(usable)}) of {len(online)} online"
    off = (present or online) - online
    if not off:
        return Check(name="cpus", level=Level.OK, seen=f"{seen}; none is offline", figures=figures)
    return Check(
        name="cpus",
        level=Level.NOTE,
        seen=f"{seen}; offline: {cpus_text(off)}",
        advice="if they shall compute, run as root: "
        f"echo 1 > /{_CPUS}/cpu{min(off)}/online, and so for each",
        figures={**figures, "offline": len(off)},
    )


def check_smt(files: SystemFiles, usable: frozenset[int]) -> Check:
    """Say which usable CPUs are hyper-threads of one core."""
    listed = [files.cpus(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list") for cpu in usable]
    groups = frozenset(siblings for siblings in listed if siblings)
    if len([siblings for siblings in listed if siblings]) < len(usable):
        return Check.unknown("smt", "the system does not tell which CPUs share a core")
    inside = sorted((group & usable for group in groups), key=min)
    shared = [group for group in inside if len(group) > 1]
    figures = {"cores": len(inside), "shared_cores": len(shared)}
    if shared:
        return Check(
            name="smt",
            level=Level.NOTE,
            seen=f"CPUs {cpus_text(shared[0])} share a core"
            + (f", and so in {len(shared)} cores" if len(shared) > 1 else ""),
            advice=f"tune with at most {len(inside)} threads, each on a core of its own: "
            f"taskset -c {cpus_text(frozenset(min(group) for group in inside))} gemm-tuner sweep",
            figures=figures,
        )
    lent = frozenset[int]().union(*groups) - usable
    if lent:
        return Check(
            name="smt",
            level=Level.NOTE,
            seen=f"CPUs {cpus_text(lent)} share cores with those that are usable here",
            advice="keep other work off them while you tune",
            figures=figures,
        )
    seen = "no two usable CPUs share a core, as far as the system tells"
    return Check(name="smt", level=Level.OK, seen=seen, figures=figures)


def check_quota(files: SystemFiles, usable: frozenset[int]) -> Check:
    """Say whether the control group of this process limits its CPU time."""
    groups = files.path(_CGROUPS)
    if not groups.is_dir():
        return Check.unknown("quota", f"there is no folder {groups}")
    quota = quota_cpus(groups, files.path("proc/self/cgroup"))
    figures = {"quota_cpus": quota}
    if quota is None or quota >= len(usable):
        seen = "none" if quota is None else f"{quota} CPUs, no fewer than are usable"
        return Check(name="quota", level=Level.OK, seen=seen, figures=figures)
    return Check(
        name="quota",
        level=Level.NOTE,
        seen=f"this container may use the time of {quota} of {len(usable)} CPUs; "
        "who has used it up stands still for the rest of a period",
        advice=f"tune with at most {quota} threads, or give the container whole CPUs (a cpuset)",
        figures=figures,
    )
