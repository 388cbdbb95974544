"""Detect the CPU: its model, usable features, caches and cores."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gemm_tuner.domain.cpu import Caches, Cpu, IsaFeature, parse_isa
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.amx import ask_for_amx
from gemm_tuner.machine.cpus import quota_cpus
from gemm_tuner.machine.system_text import system_text

ISA_VARIABLE = "GEMM_TUNER_ISA"

_SYSTEM_CPUS = Path("/sys/devices/system/cpu")
_AMX = frozenset(
    {IsaFeature.AMX_TILE, IsaFeature.AMX_BF16, IsaFeature.AMX_INT8, IsaFeature.AMX_FP16}
)
_SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def detect_cpu() -> Cpu:
    """Return the CPU of this machine, with the features that this process may use.

    The environment variable GEMM_TUNER_ISA, such as `avx2,fma`, takes away every feature that it
    does not name; it adds none.

    Raises:
        InvalidSetting: GEMM_TUNER_ISA names a feature that gemm-tuner does not know.
    """
    return _detect_cpu(os.environ.get(ISA_VARIABLE))


@cache
def _detect_cpu(allowed: str | None) -> Cpu:
    fields = _cpu_fields()
    return Cpu(
        vendor=fields["vendor_id"],
        brand=fields["model name"],
        family=_number(fields["cpu family"]),
        model=_number(fields["model"]),
        stepping=_number(fields["stepping"]),
        isa=_usable_isa(fields["flags"].split()) & _allowed_isa(allowed),
        caches=_caches(),
        physical_cores=_physical_cores(),
    )


def read_cpu_fields(text: str) -> dict[str, str]:
    """Return the fields of the first processor in the text of /proc/cpuinfo."""
    first, _blank, _others = text.partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _colon, value in pairs}


def _number(text: str) -> int:
    """Return a number of /proc/cpuinfo, 0 where it says `unknown`."""
    return int(text) if text.isdecimal() else 0


def _cpu_fields() -> Mapping[str, str]:
    try:
        fields = read_cpu_fields(Path("/proc/cpuinfo").read_text())
    except OSError:
        fields = {}
    if "flags" in fields:
        return fields
    import cpuinfo  # noqa: PLC0415 - seldom needed, and slow to load

    found = cpuinfo.get_cpu_info()  # starts a process: about a second
    return {
        "vendor_id": str(found.get("vendor_id_raw", "unknown")),
        "model name": str(found.get("brand_raw", "unknown")),
        "cpu family": str(found.get("family", 0)),
        "model": str(found.get("model", 0)),
        "stepping": str(found.get("stepping", 0)),
        "flags": " ".join(found.get("flags", [])),
    }


def _usable_isa(flags: list[str]) -> frozenset[IsaFeature]:
    # Linux leaves out of the flags what it has not enabled in XCR0; AMX needs a permission too.
    isa = parse_isa(flags)
    return isa if not isa & _AMX or ask_for_amx() is None else isa - _AMX


def why_not_usable(missing: frozenset[IsaFeature]) -> str:
    """Say why this process cannot use features that `detect_cpu` does not find."""
    if ISA_VARIABLE in os.environ:
        return f"not among the features that {ISA_VARIABLE} leaves, {os.environ[ISA_VARIABLE]}"
    if IsaFeature.AMX_TILE in missing & parse_isa(_cpu_fields()["flags"].split()):
        return f"refused by the system: {ask_for_amx()}"
    return "the CPU lacks it, or its hypervisor, firmware or kernel does not enable it"


def _allowed_isa(text: str | None) -> frozenset[IsaFeature]:
    if text is None:
        return frozenset(IsaFeature)
    names = [name.strip() for name in text.split(",") if name.strip()]
    allowed = parse_isa(names)
    if len(allowed) != len(set(names)):
        unknown = sorted(set(names) - {feature.value for feature in allowed})
        raise InvalidSetting(
            f"{ISA_VARIABLE} names {', '.join(unknown)}, which is not known; "
            f"use some of: {', '.join(feature.value for feature in IsaFeature)}."
        )
    return allowed


def _caches() -> Caches:
    sizes: dict[str, int] = {}
    for folder in (_SYSTEM_CPUS / "cpu0" / "cache").glob("index*"):
        if system_text(folder / "type") != "Instruction":
            sizes[system_text(folder / "level")] = parse_size_bytes(system_text(folder / "size"))
    return Caches(
        l1d_bytes=sizes.get("1", 0), l2_bytes=sizes.get("2", 0), l3_bytes=sizes.get("3", 0)
    )


def parse_size_bytes(text: str) -> int:
    """Return a size written as in sysfs, such as `32768K`, in bytes; 0 if it is not understood."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _SIZE_UNITS.get(match[2], 1) if match else 0


def _physical_cores() -> int:
    """Return how many cores this process may keep busy: by its affinity and its CPU quota."""
    cores = {
        system_text(_SYSTEM_CPUS / f"cpu{number}" / "topology" / "thread_siblings_list")
        or str(number)
        for number in os.sched_getaffinity(0)
    }
    return max(1, min(len(cores), quota_cpus() or len(cores)))
