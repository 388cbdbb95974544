"""Checks of instruction sets: which are usable, and why AMX is not."""

import os
import re

from gemm_tuner.domain.check import Check, Level
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text, parse_isa
from gemm_tuner.machine.amx import ask_for_amx
from gemm_tuner.machine.detect import ISA_VARIABLE, read_cpu_fields
from gemm_tuner.machine.system import SystemFiles
from gemm_tuner.space.cores import CORES

_LEAST_KERNEL = (5, 16)  # Linux, which asks for AMX by arch_prctl from there on


def check_instructions(cpu: Cpu) -> Check:
    """Say which instruction sets kernels may use."""
    figures = {"isa": isa_text(cpu.isa), "widest": cpu.isa_key}
    seen = f"{cpu.brand}: {isa_text(cpu.isa)}"
    if ISA_VARIABLE in os.environ:
        return Check(
            name="instructions",
            level=Level.NOTE,
            seen=f"{seen} ({ISA_VARIABLE} leaves no others)",
            advice=f"unset {ISA_VARIABLE} to tune for all that the CPU has",
            figures=figures,
        )
    if IsaFeature.AVX2 not in cpu.isa:
        return Check(
            name="instructions",
            level=Level.NOTE,
            seen=f"{seen}; kernels are scalar without AVX2 and FMA",
            advice="if this is a virtual machine, let its hypervisor pass the host's CPU through",
            figures=figures,
        )
    return Check(name="instructions", level=Level.OK, seen=seen, figures=figures)


def check_amx(files: SystemFiles, cpu: Cpu) -> Check:
    """Say whether AMX is usable, and if not, whose doing that is."""
    if IsaFeature.AMX_TILE in cpu.isa:
        return Check(name="amx", level=Level.OK, seen="usable", figures={"usable": True})
    flags = read_cpu_fields(files.read("proc/cpuinfo") or "").get("flags", "").split()
    if not flags:
        return Check.unknown("amx", f"{files.path('proc/cpuinfo')} does not tell what the CPU has")
    has_it = any(IsaFeature.AMX_TILE in core.cpu.isa for core in CORES.values() if core.is_of(cpu))
    if IsaFeature.AMX_TILE not in parse_isa(flags) and not has_it:
        return Check(
            name="amx",
            level=Level.OK,
            seen="not usable: this CPU model is not known to have it; kernels for it are proved by "
            "emulation",
            figures={"usable": False},
        )
    why, advice = _why_not_usable(flags, files.read("proc/sys/kernel/osrelease") or "")
    return Check(
        name="amx",
        level=Level.NOTE,
        seen=f"not usable: {why}",
        advice=advice,
        figures={"usable": False},
    )


def _why_not_usable(flags: list[str], release: str) -> tuple[str, str]:
    """Return why a CPU that has AMX does not offer it here, and what to do."""
    if IsaFeature.AMX_TILE in parse_isa(flags):
        if ISA_VARIABLE in os.environ:
            return f"{ISA_VARIABLE} leaves it out", f"unset {ISA_VARIABLE}"
        refusal = ask_for_amx() or "it was permitted just now, but not before"
        advice = "let the container's filter of system calls permit arch_prctl, or update Linux"
        return f"the system refuses it: {refusal}", advice
    version = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if version and version < _LEAST_KERNEL:
        return f"Linux {release} is too old for it", "use Linux 5.16 or newer"
    if "hypervisor" in flags:
        return (
            "this CPU model has it, but the hypervisor hides it",
            "let the hypervisor pass the host's CPU through, with AMX",
        )
    return (
        "this CPU model has it, but the firmware or the kernel does not enable it",
        "look for AMX in the firmware's setup, and for clearcpuid or noxsave in /proc/cmdline",
    )
