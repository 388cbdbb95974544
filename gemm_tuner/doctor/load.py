"""Checks of other work: what a hypervisor takes, what else runs here, and who measures."""

import errno
import fcntl
import os
from collections.abc import Collection
from pathlib import Path

from gemm_tuner.doctor.noise import Watch
from gemm_tuner.doctor.system import SystemFiles
from gemm_tuner.domain.check import Check, Figure, Level
from gemm_tuner.domain.doubt import why_interfered
from gemm_tuner.domain.measurement import Interference
from gemm_tuner.machine.processors import read_processor_times

_SOME = 0.01
_BUSY_CORES = 0.3  # as tuning/patience.py: what every machine does now and then
_MOST_WAITED = 0.05


def check_steal(files: SystemFiles, usable: Collection[int], seen: Watch) -> Check:
    """Say how much of the CPUs' time the hypervisor gives to other machines."""
    stat = files.path("proc/stat")
    ever = read_processor_times(usable, stat)
    if not ever.total or seen.use is None:
        return Check.unknown("steal", f"{stat} does not tell")
    since_start, now = ever.stolen / ever.total, seen.use.stolen
    text = f"{now:.1%} of the time now, {since_start:.1%} since the machine started"
    figures = {"now": round(now, 4), "since_start": round(since_start, 4)}
    # The limit is that at which a measurement decides nothing.
    doubt = why_interfered(Interference(disturbed_rounds=0.0, stolen=now, others=0.0))
    if doubt:
        return Check(
            name="steal",
            level=Level.PROBLEM,
            seen=f"{text}: measurements that lose so much decide nothing",
            advice="move to a machine with CPUs of its own, or tune at another time",
            figures=figures,
        )
    if max(now, since_start) > _SOME:
        advice = "expect sweeps to wait and to measure again; dedicated CPUs would be steadier"
        return Check(name="steal", level=Level.NOTE, seen=text, advice=advice, figures=figures)
    return Check(name="steal", level=Level.OK, seen=text, figures=figures)


def check_load(files: SystemFiles, usable: Collection[int], seen: Watch) -> Check:
    """Say what else ran on the usable CPUs while the loops of the noise score did."""
    parts = []
    figures: dict[str, Figure] = {"waited": None, "others": None}
    others, waited = seen.use.others if seen.use else None, seen.waited
    if others is None:
        parts.append(f"not known: use of the CPUs ({files.path('proc/stat')} does not tell)")
    else:
        figures["others"] = round(others, 2)
        parts.append(f"other work kept {others:.1f} of {len(usable)} CPUs busy")
    if waited is not None:
        figures["waited"] = round(waited, 4)
        parts.append(f"the loop waited for a CPU {waited:.1%} of the time")
    average = (files.read("proc/loadavg") or "").split()
    if len(average) >= 4:
        running = average[3].partition("/")[0]
        figures["load_1_min"] = _number(average[0])
        parts.append(f"load {average[0]} {average[1]} {average[2]}, {running} threads ready to run")
    text = "; ".join(parts)
    advice = "stop what else runs (top names it), or wait until it has ended"
    if waited is not None and waited > _MOST_WAITED:
        return Check(name="load", level=Level.PROBLEM, seen=text, advice=advice, figures=figures)
    if others is None:
        return Check(name="load", level=Level.NOTE, seen=text, figures=figures)
    if others > _BUSY_CORES:
        return Check(name="load", level=Level.NOTE, seen=text, advice=advice, figures=figures)
    return Check(name="load", level=Level.OK, seen=text, figures=figures)


def check_lock(files: SystemFiles, path: Path) -> Check:
    """Say whether a worker of this user measures now, and which process that is."""
    name = "measuring lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Check(name=name, level=Level.OK, seen="free: no worker has run here yet")
    except OSError as error:
        return Check.unknown(name, f"{path} cannot be read ({error.strerror})")
    try:
        # Shared, and only for a moment: a worker that wants it in it asks again soon.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            return Check.unknown(name, f"{path} cannot be locked ({error.strerror})")
        return Check(
            name=name,
            level=Level.NOTE,
            seen=f"held by {_holder(files, os.fstat(descriptor).st_ino)}, which measures now",
            advice="wait until it is done: two that measure at once disturb each other",
            figures={"is_held": True},
        )
    finally:
        os.close(descriptor)
    return Check(name=name, level=Level.OK, seen="free", figures={"is_held": False})


def _holder(files: SystemFiles, inode: int) -> str:
    """Return the process that holds a lock, as far as the system tells."""
    for line in (files.read("proc/locks") or "").splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            command = files.read(f"proc/{words[4]}/comm")
            return f"process {words[4]}{f' ({command})' if command else ''}"
    return "a process that the system does not name"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
