"""Run the parts of a call in several threads: of native/pool.c, or of Python without it."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from gemm_tuner.abi import OK, ArgsStruct, KernelLibrary
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.runtime.direct import NATIVE

PIN_VARIABLE = "GEMM_TUNER_PIN"


@cache
def configure_pool() -> None:
    """Let calls have as many threads as this process may keep busy.

    With GEMM_TUNER_PIN=1, each of the pool's threads stays on a CPU of its own; the first usable
    CPU is left to the thread that calls.

    Raises:
        InvalidSetting: GEMM_TUNER_PIN is neither 0 nor 1.
    """
    choice = os.environ.get(PIN_VARIABLE, "0")
    if choice not in {"0", "1"}:
        raise InvalidSetting(f"{PIN_VARIABLE} is {choice!r}; use 1 to pin threads to CPUs, or 0.")
    if NATIVE is not None:
        cpus = tuple(sorted(os.sched_getaffinity(0))) if choice == "1" else None
        NATIVE.configure_pool(usable_cpus(), cpus)


def run_parts(library: KernelLibrary, args: ArgsStruct, parts: int) -> bool:
    """Compute all parts of all phases, and return whether the kernel took its arguments."""
    if NATIVE is not None and library.run_address:
        address = ctypes.addressof(args)
        status = NATIVE.run_parts(library.run_address, address, library.phases, parts)
        return bool(status == OK)
    return all(_run_phase(library, args, phase, parts) for phase in range(library.phases))


def _run_phase(library: KernelLibrary, args: ArgsStruct, phase: int, parts: int) -> bool:
    if parts == 1:
        return library.run(args, phase, 0, 1) == OK
    pool = _threads(parts)
    statuses = list(pool.map(lambda part: library.run(args, phase, part, parts), range(parts)))
    return all(status == OK for status in statuses)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="gemm-tuner")


# A forked child has the pools but not their threads: its calls would wait for ever.
os.register_at_fork(after_in_child=_threads.cache_clear)
