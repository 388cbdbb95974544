"""Run the parts of a call in several threads: of native/pool.c, or of Python without it."""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import TypeVar

from gemm_tuner.abi import OK, ArgsStruct, KernelLibrary, WeightsStruct, check_packing
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.runtime.direct import NATIVE

PIN_VARIABLE = "GEMM_TUNER_PIN"

_Result = TypeVar("_Result")


def pins_threads() -> bool:
    """Return whether GEMM_TUNER_PIN asks for a CPU for each thread of the pool.

    Raises:
        InvalidSetting: it is neither 0 nor 1.
    """
    choice = os.environ.get(PIN_VARIABLE) or "0"
    if choice not in {"0", "1"}:
        raise InvalidSetting(f"{PIN_VARIABLE} is {choice!r}; use 1 to pin threads to CPUs, or 0.")
    return choice == "1"


@cache
def configure_pool() -> None:
    """Let calls have as many threads as this process may keep busy.

    With GEMM_TUNER_PIN=1, each of the pool's threads stays on a CPU of its own; the first usable
    CPU is left to the thread that calls.

    Raises:
        InvalidSetting: GEMM_TUNER_PIN is neither 0 nor 1.
    """
    is_pinning = pins_threads()
    if NATIVE is not None:
        cpus = tuple(sorted(os.sched_getaffinity(0))) if is_pinning else None
        NATIVE.configure_pool(usable_cpus(), cpus)


def run_parts(library: KernelLibrary, args: ArgsStruct, parts: int, threads: int) -> bool:
    """Compute all parts of all phases in up to `threads` threads.

    Returns whether the kernel took its arguments.
    """
    if NATIVE is not None and library.run_address:
        address = ctypes.addressof(args)
        status = NATIVE.run_parts(library.run_address, address, library.phases, parts, threads)
        return bool(status == OK)
    return all(_run_phase(library, args, phase, parts, threads) for phase in range(library.phases))


def _run_phase(
    library: KernelLibrary, args: ArgsStruct, phase: int, parts: int, threads: int
) -> bool:
    def run(part: int) -> int:
        return library.run(args, phase, part, parts)

    return all(status == OK for status in _each_part(run, parts, threads))


def pack_parts(
    library: KernelLibrary,
    products: Sequence[WeightsStruct],
    packed_w: int,
    stride_bytes: int,
    *,
    parts: int,
    threads: int,
) -> None:
    """Pack the weights of products to addresses `stride_bytes` apart, in parts as calls have them.

    Each thread packs what it will read, so that the memory is near it. A library that cannot pack
    in parts does it in this thread.

    Raises:
        KernelRejected: the kernel is made for weights of another kind.
    """
    if parts == 1 or not library.pack_part_address:
        for place, weights in enumerate(products):
            library.pack_weights(weights, packed_w + place * stride_bytes)
    elif NATIVE is not None:
        table = (WeightsStruct * len(products))(*products)
        status = NATIVE.pack(
            library.pack_part_address,
            ctypes.addressof(table),
            packed_w,
            stride_bytes,
            len(products),
            parts,
            threads,
        )
        check_packing(status)
    else:
        for place, weights in enumerate(products):
            pack = partial(_pack_part, library, weights, packed_w + place * stride_bytes, parts)
            _each_part(pack, parts, threads)


def _pack_part(
    library: KernelLibrary, weights: WeightsStruct, packed_w: int, parts: int, part: int
) -> None:
    library.pack_weights(weights, packed_w, part=part, parts=parts)


def _each_part(do: Callable[[int], _Result], parts: int, threads: int) -> list[_Result]:
    if parts == 1 or threads == 1:
        return [do(part) for part in range(parts)]
    pool = _threads(min(parts, threads))
    begun: list[Future[_Result]] = []
    try:
        begun.extend(pool.submit(do, part) for part in range(parts))
        return [one.result() for one in begun]
    finally:  # who is interrupted frees the arrays: no part may go on with them
        for one in begun:
            one.cancel()
        wait(begun)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix="gemm-tuner")


# A forked child has the pools but not their threads: its calls would wait for ever.
os.register_at_fork(after_in_child=_threads.cache_clear)
