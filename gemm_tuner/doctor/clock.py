"""The check of the CPU's clock: who sets it, what it is, and how steady."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import monotonic

from gemm_tuner.domain.check import Check, Figure, Level
from gemm_tuner.machine.detect import read_cpu_fields
from gemm_tuner.machine.system import SystemFiles

WATCH_S = 1.0
_LEAST_SAMPLES = 20
_POLICY = "sys/devices/system/cpu/cpu{}/cpufreq"
_BOOST = "sys/devices/system/cpu/cpufreq/boost"
_NO_TURBO = "sys/devices/system/cpu/intel_pstate/no_turbo"
_CPPC = "sys/devices/system/cpu/cpu{}/acpi_cppc/nominal_freq"
_IN_NAME = re.compile(r"@ (\d+(?:\.\d+)?)GHz")
_LARGEST_SPREAD = 0.05
_LEAST_OVER_NOMINAL = 0.95
# What these drivers call so raises the clock with the load as it should.
_DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clock in Hz of each sample that nothing interrupted."""

    hz: tuple[float, ...]

    @property
    def median_hz(self) -> float:
        """Return the median."""
        return median(self.hz)

    @property
    def low_hz(self) -> float:
        """Return the 5th percentile."""
        return sorted(self.hz)[ceil(0.05 * len(self.hz)) - 1]

    @property
    def high_hz(self) -> float:
        """Return the 95th percentile."""
        return sorted(self.hz)[ceil(0.95 * len(self.hz)) - 1]

    @property
    def spread(self) -> float:
        """Return the distance of these percentiles over the median."""
        return (self.high_hz - self.low_hz) / self.median_hz


def watch_clock(
    run: Callable[[], tuple[float, bool]],
    *,
    tell: Callable[[float], None],
    seconds: float,
    clock: Callable[[], float] = monotonic,
) -> Clock | None:
    """Run the loop for some time; None if nearly all samples were interrupted."""
    found: list[float] = []
    start_s = clock()
    while (spent_s := clock() - start_s) < seconds:
        tell(spent_s)
        hz, is_interrupted = run()
        found += [] if is_interrupted else [hz]
    return Clock(hz=tuple(found)) if len(found) >= _LEAST_SAMPLES else None


def check_clock(files: SystemFiles, cpu: int, seen: Clock | None, why_not: str) -> Check:
    """Say which clock a CPU has; `why_not` is why it was not seen."""
    governor, boost = files.read(f"{_POLICY.format(cpu)}/scaling_governor"), _boost(files)
    driver = files.read(f"{_POLICY.format(cpu)}/scaling_driver") or ""
    nominal_hz = _nominal_hz(files, cpu)
    nominal = "not known" if nominal_hz is None else _text(nominal_hz)
    setter = f"governor {governor}" if governor else "not known: governor (a hypervisor may set it)"
    figures: dict[str, Figure] = {"governor": governor, "boost": boost, "nominal_hz": nominal_hz}
    settings = f"nominal {nominal}; {setter}"
    if boost is not None:
        settings += f"; boost {'on' if boost else 'off'}"
    advice = []
    if governor not in {None, "performance"} and not driver.startswith(_DYNAMIC_DRIVERS):
        advice.append("for a steady clock, run as root: cpupower frequency-set -g performance")
    if seen is None:
        # That nothing could be measured here is known; the rest is what the system says.
        return Check(
            name="clock",
            level=Level.NOTE,
            seen=f"not known: {why_not}; {settings}",
            advice="; ".join(advice),
            figures=figures,
        )
    figures |= {"median_hz": round(seen.median_hz), "spread": round(seen.spread, 4)}
    measured = f"{_text(seen.median_hz)} measured"
    if nominal_hz:
        measured += f" ({seen.median_hz / nominal_hz:.2f} times the nominal one)"
    if seen.spread > _LARGEST_SPREAD:
        advice.append("look for heat, a power limit, or neighbours that share the clock")
        measured += f", 90 % of samples from {_text(seen.low_hz)} to {_text(seen.high_hz)}"
    else:
        measured += f", steady within {seen.spread:.1%}"
    if nominal_hz and seen.median_hz < _LEAST_OVER_NOMINAL * nominal_hz:
        advice.append("it is below its nominal clock: look for a power limit or a governor")
    level = Level.NOTE if advice else Level.OK
    return Check(
        name="clock",
        level=level,
        seen=f"{measured}; {settings}",
        advice="; ".join(advice),
        figures=figures,
    )


def _boost(files: SystemFiles) -> bool | None:
    boost, no_turbo = files.number(_BOOST), files.number(_NO_TURBO)
    if boost is not None:
        return bool(boost)
    return None if no_turbo is None else not no_turbo


def _nominal_hz(files: SystemFiles, cpu: int) -> float | None:
    """Return the clock that the vendor guarantees, None if nobody tells.

    Where Linux does not set the clock, /proc/cpuinfo has the nominal one; else that of the moment.
    """
    base_khz = files.number(f"{_POLICY.format(cpu)}/base_frequency")
    if base_khz:
        return base_khz * 1e3
    cppc_mhz = files.number(_CPPC.format(cpu))
    if cppc_mhz:
        return cppc_mhz * 1e6
    fields = read_cpu_fields(files.read("proc/cpuinfo") or "")
    if in_name := _IN_NAME.search(fields.get("model name", "")):
        return float(in_name[1]) * 1e9
    is_set_by_linux = files.path(_POLICY.format(cpu)).is_dir()
    text = fields.get("cpu MHz", "")
    is_number = re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0
    return float(text) * 1e6 if is_number and not is_set_by_linux else None


def _text(hz: float) -> str:
    return f"{hz / 1e9:.2f} GHz"
