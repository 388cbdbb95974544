"""Gather what surrounded a measurement and could have changed it."""

import platform
from functools import cache
from pathlib import Path
from statistics import median, quantiles

from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.record import Conditions
from gemm_tuner.domain.sandbox import Sandbox
from gemm_tuner.machine.detect import read_cpu_fields
from gemm_tuner.machine.topology import detect_topology

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNKNOWN = "unknown"


def gather_conditions(*, peak_flop_per_s: float, baseline: Timing, sandbox: Sandbox) -> Conditions:
    """Return the conditions of a measurement whose baseline was timed as given."""
    return Conditions(
        peak_flop_per_s=peak_flop_per_s,
        noise=relative_spread(baseline.samples_ns),
        huge_pages=huge_pages(),
        kernel_release=platform.release(),
        microcode=_microcode(),
        topology=detect_topology().text,
        sandbox=sandbox.level,
    )


def relative_spread(samples: tuple[int, ...]) -> float:
    """Return the interquartile range over the median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    first, _second, third = quantiles(samples, n=4, method="inclusive")
    return (third - first) / median(samples)


def huge_pages() -> str:
    """Return the setting in use: the word in brackets of `always [madvise] never`."""
    text = _read(_HUGE_PAGES)
    chosen = text.partition("[")[2].partition("]")[0]
    return chosen or _UNKNOWN


@cache
def _microcode() -> str:
    return read_cpu_fields(_read(Path("/proc/cpuinfo"))).get("microcode", _UNKNOWN)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
