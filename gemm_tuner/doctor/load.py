"""Checks of other work: what a hypervisor takes, what else runs here, and who measures."""

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemm_tuner.doctor.noise import Watch
from gemm_tuner.domain.check import Check, Figure, Level
from gemm_tuner.domain.doubt import why_interfered
from gemm_tuner.domain.measurement import Interference
from gemm_tuner.machine.measuring_lock import holder_of
from gemm_tuner.machine.processors import USUAL_LOAD_CORES, read_processor_times
from gemm_tuner.machine.system import SystemFiles

_SOME = 0.01
_MOST_WAITED = 0.05
_LOCK = "measuring lock"


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
    if others > USUAL_LOAD_CORES:
        return Check(name="load", level=Level.NOTE, seen=text, advice=advice, figures=figures)
    return Check(name="load", level=Level.OK, seen=text, figures=figures)


@contextmanager
def shared_lock(files: SystemFiles, path: Path) -> Iterator[Check]:
    """Say whether a worker of this user measures now, and which process that is.

    If none does, none begins before the context is closed. A lock that no worker made is not made.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield _lock_check("free: no worker has run here yet", is_held=False)
        return
    except OSError as error:
        yield Check.unknown(_LOCK, f"{path} cannot be read ({error.strerror})")
        return
    try:
        yield _lock_descriptor(files, descriptor)
    finally:
        os.close(descriptor)


def is_held(lock: Check) -> bool:
    """Return whether what `shared_lock` said is that a worker measures."""
    return lock.figures.get("is_held") is True


def _lock_descriptor(files: SystemFiles, descriptor: int) -> Check:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(files, os.fstat(descriptor).st_ino)
        return _lock_check(f"held by {holder}, which measures now", is_held=True)
    except OSError as error:
        return Check.unknown(_LOCK, f"it cannot be taken ({error.strerror})")
    return _lock_check("free", is_held=False)


def _lock_check(seen: str, *, is_held: bool) -> Check:
    return Check(
        name=_LOCK,
        level=Level.NOTE if is_held else Level.OK,
        seen=seen,
        advice="run this again when it is done" if is_held else "",
        figures={"is_held": is_held},
    )


def _holder(files: SystemFiles, inode: int) -> str:
    """Return the process that holds a lock, as far as the system tells."""
    holder = holder_of(inode, files.read("proc/locks") or "")
    if holder is None:
        return "a process that the system does not name"
    command = files.read(f"proc/{holder}/comm")
    return f"process {holder}{f' ({command})' if command else ''}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
