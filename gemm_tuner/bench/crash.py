"""The notes of a process that may die, in memory shared with the process that watches it."""

import ctypes
import mmap
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from gemm_tuner.bench.guard import Region
from gemm_tuner.domain.record import Outcome

_REFUSAL_BYTES = 512

# No kernel sends itself these: they come from the system, and say nothing about the kernel.
_BY_THE_SYSTEM = frozenset({signal.SIGKILL, signal.SIGTERM})


class _CrashStruct(ctypes.Structure):
    """`crash_report` of bench/native/crash.c."""

    _fields_ = (
        ("signal", ctypes.c_int32),
        ("in_region", ctypes.c_int32),
        ("system_call", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("region", ctypes.c_char * 64),
    )


class _ReportStruct(ctypes.Structure):
    _fields_ = (
        ("crash", _CrashStruct),
        ("running", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("refusal", ctypes.c_char * _REFUSAL_BYTES),
    )


class Report:
    """Progress and last words of a child: made before it is forked, read by its parent."""

    REFUSAL_BYTES: ClassVar[int] = _REFUSAL_BYTES

    def __init__(self, crash_driver: Path) -> None:
        """Load the driver that handles fatal signals."""
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._report = _ReportStruct.from_buffer(self._memory)
        self._driver = ctypes.CDLL(str(crash_driver))
        self._driver.crash_add_region.argtypes = (
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_char_p,
        )

    def clear(self) -> None:
        """Forget what the last child wrote."""
        ctypes.memset(ctypes.addressof(self._report), 0, ctypes.sizeof(self._report))

    def watch(self) -> None:
        """In the child: write down fatal signals from now on."""
        self._driver.crash_watch(ctypes.byref(self._report.crash))

    def watch_regions(self, regions: Iterable[Region]) -> None:
        """In the child: know these regions by name, and no others."""
        self._driver.crash_forget_regions()
        for region in regions:
            self._driver.crash_add_region(region.begin, region.end, region.name.encode())

    def step(self, running: int = 0) -> None:
        """In the child: say that it goes on, and which of several runners runs next."""
        self._report.running = running
        self._report.steps += 1

    @property
    def refusal_address(self) -> int:
        """Return where an emulator writes why an instruction is refused: `REFUSAL_BYTES` bytes."""
        return ctypes.addressof(self._report) + _ReportStruct.refusal.offset

    @property
    def running(self) -> int:
        """Return which runner ran last."""
        return int(self._report.running)

    @property
    def steps(self) -> int:
        """Return how often the child said that it goes on."""
        return int(self._report.steps)

    def explain_death(self, status: int) -> tuple[Outcome, str]:
        """Return why the child ended with the exit code `status` (negative for a signal)."""
        crash = self._report.crash
        if crash.in_region:
            name = crash.region.decode(errors="replace")
            return Outcome.OUT_OF_BOUNDS, f"touched {name}, {crash.offset} bytes into it"
        if self._report.refusal:
            return Outcome.CRASHED, self._report.refusal.decode(errors="replace")
        if -status == signal.SIGSYS:
            number = f" {crash.system_call - 1}" if crash.system_call else ""
            return Outcome.CRASHED, f"made system call{number}, which no kernel has a use for"
        if -status in _BY_THE_SYSTEM:
            name = signal.Signals(-status).name
            return Outcome.HUNG, f"ended by {name}, as when memory runs out; it is tried again"
        if status < 0:
            return Outcome.CRASHED, f"ended by {signal.Signals(-status).name}"
        return Outcome.CRASHED, f"ended its process with exit code {status}"
