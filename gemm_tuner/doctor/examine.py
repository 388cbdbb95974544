"""All checks of a machine, in the order in which they are told."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from gemm_tuner.build.cache import CACHE_VARIABLE
from gemm_tuner.doctor import clock, features, kept, load, noise, pages, processors, tools
from gemm_tuner.doctor.fastest import default_path, over_fastest
from gemm_tuner.doctor.loops import (
    Loop,
    block_bytes,
    compiled_clock,
    compiled_loops,
    plain_loops,
)
from gemm_tuner.domain.check import Check, Level
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.machine.available_memory import available_memory_bytes
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.machine.system import SystemFiles
from gemm_tuner.sandbox.confine import look_at_sandbox
from gemm_tuner.store.maintenance.examining import shown_url
from gemm_tuner.store.sql.database import database_file

_CLOCK_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"

# Told what is watched, for how many seconds so far, and of how many.
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is examined: this machine for this process, and the database at `url`."""

    cpu: Cpu
    url: str
    files: SystemFiles = field(default_factory=SystemFiles)
    usable: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    lock: Path = field(default_factory=lambda: MeasuringLock().path)
    data: Path = field(default_factory=lambda: user_data_path("gemm-tuner"))
    fastest: Path = field(default_factory=default_path)
    cache: Path = field(
        default_factory=lambda: Path(
            os.environ.get(CACHE_VARIABLE) or user_cache_path("gemm-tuner")
        )
    )


def examine(here: Surroundings, tell: Tell) -> Iterator[Check]:
    """Yield all checks, each as soon as it is made. What cannot be found out is a note."""
    files, cpu, usable = here.files, here.cpu, here.usable
    yield from _made("instructions", lambda: [features.check_instructions(cpu)])
    yield from _made("amx", lambda: [features.check_amx(files, cpu)])
    yield from _made("cpus", lambda: [processors.check_cpus(files, usable)])
    yield from _made("smt", lambda: [processors.check_smt(files, usable)])
    yield from _made("quota", lambda: [processors.check_quota(files, usable)])
    yield from _made("huge pages", lambda: [pages.check_huge_pages(files)])
    with load.shared_lock(files, here.lock) as lock:
        yield lock
        yield from _in_motion(here, tell, is_disturbing=load.is_held(lock))
    yield from _made("compiler", lambda: [tools.check_compiler(cpu)])
    yield from _made("baselines", lambda: [tools.check_baselines()])
    yield from _made("sandbox", lambda: [tools.check_sandbox(look_at_sandbox())])
    yield from _made("database", lambda: _check_database(here))
    yield from _made("keys", lambda: [kept.check_keys(here.data)])
    yield from _made("space", lambda: [_check_space(here)])


def _in_motion(here: Surroundings, tell: Tell, *, is_disturbing: bool) -> Iterator[Check]:
    """Yield what loops find out, which would disturb a worker that measures now."""
    if is_disturbing:
        for name in ("clock", "noise", "load", "steal"):
            yield Check.unknown(name, "the loops would disturb what is measured now")
        return
    yield from _made("clock", lambda: [_check_clock(here, tell)])
    yield from _made("noise", lambda: _check_noise(here, tell))


def _made(name: str, make: Callable[[], Sequence[Check]]) -> Sequence[Check]:
    """Return what `make` does, or that it is not known, and why."""
    try:
        return make()
    except GemmTunerError as error:
        refused = Check.of_error(name, Level.NOTE, error)
        unknown = Check.unknown(name, refused.seen)
        return [Check(name=name, level=unknown.level, seen=unknown.seen, advice=refused.advice)]
    except (OSError, ValueError, ArithmeticError, RecursionError) as error:
        # A file of the system is missing, or says nonsense.
        return [Check.unknown(name, str(error))]


def _check_clock(here: Surroundings, tell: Tell) -> Check:
    seen, why_not = None, "others interrupted nearly all samples"
    try:
        run = compiled_clock()
    except (GemmTunerError, OSError) as error:
        why_not = f"it is measured by a compiled loop ({str(error).partition(';')[0]})"
    else:
        watched_s = clock.WATCH_S
        seen = clock.watch_clock(run, tell=lambda s: tell("clock", s, watched_s), seconds=watched_s)
    cpu = min(here.usable)
    return clock.check_clock(here.files, cpu, seen, why_not)


def _check_noise(here: Surroundings, tell: Tell) -> list[Check]:
    size_bytes = block_bytes(here.cpu, _available_bytes())
    seen = noise.watch(
        _loops(here.cpu, size_bytes),
        size_bytes=size_bytes,
        files=here.files,
        usable=here.usable,
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
        tell=lambda s: tell("noise", s, noise.WATCH_S),
        seconds=noise.WATCH_S,
    )
    slower = over_fastest(here.fastest, here.cpu, seen.samples)
    return [
        noise.check_noise(seen, slower),
        load.check_load(here.files, here.usable, seen),
        load.check_steal(here.files, here.usable, seen),
    ]


def _loops(cpu: Cpu, size_bytes: int) -> tuple[Loop, Loop]:
    try:
        return compiled_loops(cpu, size_bytes)
    except (GemmTunerError, OSError):
        return plain_loops(size_bytes)


def _available_bytes() -> int | None:
    try:
        return available_memory_bytes()
    except (OSError, StopIteration, ValueError):
        return None


def _check_database(here: Surroundings) -> list[Check]:
    shown = shown_url(here.url)
    check, found = kept.check_store(here.url, shown, here.cpu)
    newest = found.contents.newest_at if found and found.contents else None
    source = here.files.read(_CLOCK_SOURCE)
    return [check, kept.check_time(datetime.now(UTC), newest, source)]


def _check_space(here: Surroundings) -> Check:
    places = {"cache of builds": here.cache}
    file = database_file(here.url)
    if file is not None:
        places["database"] = file.parent
    return kept.check_space(places)
