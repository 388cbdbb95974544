"""Checks of what a sweep calls: the compiler, and the libraries to compare with."""

from pathlib import Path

from gemm_tuner.bench.baselines.choose import baseline_rows
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.check import Check, Level
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text
from gemm_tuner.domain.sandbox import Sandbox, SandboxLevel
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import (
    BaselineMissing,
    CompilationFailed,
    CompilationInterrupted,
    InvalidSetting,
    StoreFailed,
    ToolchainMissing,
)
from gemm_tuner.libraries.onednn import find_onednn, open_onednn
from gemm_tuner.libraries.wheels import installed_wheels
from gemm_tuner.space.catalog import CATALOG

_EMPTY = "// Nothing: only the flags matter.\n"
# The extra of this package that installs a baseline, by its name.
_EXTRAS = {"onednn": "onednn", "mkl": "peers", "onnxruntime": "peers"}
_LINKED = {  # libraries that a compiler must find
    "libxsmm": tuple(
        Path(folder) / name
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
        for name in ("libxsmm.a", "libxsmm.so")
    )
}


def check_compiler(cpu: Cpu) -> Check:
    """Say which compiler a sweep would use, and whether it can build for this CPU."""
    name = "compiler"
    families = [family for family in CATALOG.values() if family.isa <= cpu.isa]
    needed = frozenset[IsaFeature]().union(*(family.isa for family in families))
    try:
        toolchain = find_toolchain()
        compiles = _compiles(frozenset(), toolchain)
        unknown = _unknown_flags(needed, toolchain) if compiles else needed
    except (ToolchainMissing, InvalidSetting, StoreFailed, CompilationInterrupted) as error:
        return Check.of_error(name, Level.PROBLEM, error)
    figures = {"compiler": toolchain.text, "command": " ".join(toolchain.command)}
    if not compiles:
        return Check(
            name=name,
            level=Level.PROBLEM,
            seen=f"{toolchain.text} compiles nothing, not even an empty file",
            advice='repair it, or run: pip install "gemm-tuner[zig]" and set GEMM_TUNER_COMPILER '
            "to zig",
            figures=figures,
        )
    if not unknown:
        seen = f"{toolchain.text} ({toolchain.command[0]}) knows the flags of all "
        seen += f"{len(families)} kernel families that this CPU can run"
        return Check(name=name, level=Level.OK, seen=seen, figures=figures)
    lost = sorted(family.name for family in families if family.isa & unknown)
    return Check(
        name=name,
        level=Level.NOTE,
        seen=f"{toolchain.text} has no flags for {isa_text(unknown)}: {len(lost)} of "
        f"{len(families)} families are left out ({', '.join(lost)})",
        advice='use a newer compiler, or run: pip install "gemm-tuner[zig]" and set '
        "GEMM_TUNER_COMPILER to zig",
        figures=figures,
    )


def _unknown_flags(needed: frozenset[IsaFeature], toolchain: Toolchain) -> frozenset[IsaFeature]:
    """Return the features that a compiler has no flags for."""
    if _compiles(needed, toolchain):
        return frozenset()
    return frozenset(one for one in needed if not _compiles(frozenset({one}), toolchain))


def _compiles(isa: frozenset[IsaFeature], toolchain: Toolchain) -> bool:
    try:
        compile_kernel(Source(text=_EMPTY), isa=isa, toolchain=toolchain)
    except CompilationFailed:
        return False
    return True


def check_sandbox(sandbox: Sandbox) -> Check:
    """Say how far compilers and trials are shut off from the rest of this machine."""
    figures = {"sandbox": sandbox.level.value, "why": sandbox.why or None}
    seen = f"compilers and trials run with level {sandbox.level.value}"
    if sandbox.level is SandboxLevel.NAMESPACES:
        return Check(name="sandbox", level=Level.OK, seen=seen, figures=figures)
    return Check(
        name="sandbox",
        level=Level.OK if sandbox.level.hides_files else Level.NOTE,
        seen=f"{seen}, not namespaces: {sandbox.why}",
        advice=""
        if sandbox.level.hides_files
        else "permit user namespaces, or use Linux 6.7 or "
        "newer with Landlock; until then, tune with a user who has no secrets here",
        figures=figures,
    )


def check_baselines() -> Check:
    """Say which libraries are here to compare with, and which could be installed."""
    raced = [row for row in baseline_rows() if row.is_raced]
    found = {row.name: [package.text for package in row.installed()] for row in raced}
    packages = [text for row in raced if not row.attention_alone for text in found[row.name]]
    attending = [text for row in raced if row.attention_alone for text in found[row.name]]
    torch = installed_wheels("torch")
    linked = [
        f"{name} (version not known before it is linked)"
        for name, files in _LINKED.items()
        if any(file.is_file() for file in files)
    ]
    absent = sorted({_EXTRAS[name] for name in _EXTRAS if not found.get(name)})
    extras = [*absent, *([] if torch else ["torch"])]
    seen = f"raced: {', '.join(packages) or 'none'}"
    if others := [text for text in attending if text not in packages]:
        seen += f"; and for attention: {', '.join(others)}"
    if torch or linked:
        seen += f"; also timed by bench: {', '.join([*torch, *linked])}"
    figures = {
        "raced": ", ".join(packages),
        "raced for attention": ", ".join(attending),
        "others": ", ".join([*torch, *linked]),
    }
    try:
        seen += f"; {open_onednn(find_onednn()).text} loads"
    except BaselineMissing as error:
        refused = Check.of_error("baselines", Level.NOTE, error)
        return Check(
            name=refused.name,
            level=refused.level,
            seen=f"{seen}; {refused.seen}",
            advice=refused.advice,
            figures=figures,
        )
    if extras:
        seen += f'; more can be installed: pip install "gemm-tuner[{",".join(extras)}]"'
    return Check(name="baselines", level=Level.OK, seen=seen, figures=figures)
