"""Compile sources: kernels, freestanding and bit-reproducible, and hosted C drivers."""

import errno
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from gemm_tuner.build.cache import (
    MAX_BUILD_BYTES,
    build_cache_dir,
    building,
    read_build,
    write_build,
)
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.files import read_bounded
from gemm_tuner.machine.urgency import start_session
from gemm_tuner.machine.waiting import wait_for_session
from gemm_tuner.sandbox.confine import confined, why_refused
from gemm_tuner.scratch import scratch_folder

COMPILE_TIMEOUT_S = 120
_MOST_SAID_BYTES = 1 << 18
_LIMITS = {
    "AS": 8 << 30,
    "CORE": 0,
    "CPU": 2 * COMPILE_TIMEOUT_S,
    "FSIZE": 1 << 30,
    "NPROC": 256,
}

# Features are named one by one: -march=native would tie the binary to what one compiler version
# believes of one machine.
_FEATURE_FLAGS = {
    IsaFeature.FMA: "-mfma",
    IsaFeature.F16C: "-mf16c",
    IsaFeature.AVX2: "-mavx2",
    IsaFeature.AVX512F: "-mavx512f",
    IsaFeature.AVX512VL: "-mavx512vl",
    IsaFeature.AVX512BW: "-mavx512bw",
    IsaFeature.AVX512DQ: "-mavx512dq",
    IsaFeature.AVX512_BF16: "-mavx512bf16",
    IsaFeature.AVX512_VNNI: "-mavx512vnni",
    IsaFeature.AVX512_FP16: "-mavx512fp16",
    IsaFeature.AVX_VNNI: "-mavxvnni",
    IsaFeature.AMX_TILE: "-mamx-tile",
    IsaFeature.AMX_BF16: "-mamx-bf16",
    IsaFeature.AMX_INT8: "-mamx-int8",
    IsaFeature.AMX_FP16: "-mamx-fp16",
}
# gcc knows this flag from version 13 on; its assembler knows the instruction without.
_SUPERFLUOUS = {"gcc": frozenset({IsaFeature.AMX_FP16})}

_FUSES, _KEEPS_ROUNDINGS = "-ffp-contract=fast", "-ffp-contract=off"
_KERNEL_FLAGS = (
    "-std=c++17",
    "-O2",
    "-ffreestanding",
    "-fno-builtin",
    "-nostdlib",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fcf-protection=none",
    "-fno-math-errno",
    "-fno-trapping-math",
    _FUSES,
    "-fno-ident",
    "-Wl,--build-id=none",
    "-Wl,-z,defs",
    "-Wl,-z,noexecstack",
)
_TOOLCHAIN_FLAGS = {
    # gcc would turn the packing loops into calls of memcpy, which a freestanding library lacks.
    "gcc": ("-fno-tree-loop-distribute-patterns", "-Wno-psabi"),
    "clang": ("-Wno-psabi",),
    "zig": ("-target", "x86_64-linux-musl", "-Wno-psabi", "-s", "-fno-sanitize=undefined"),
}
# Of these two tables while records did not name the flags.
_FLAGS_OF_OLD = "326e68cc7ece22b4a751d4534e541f80325d3dffc29b551963831dfa637d5420"
_HOSTED_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi")
_HOSTED_LINK_FLAGS = {
    "gcc": ("-lpthread", "-ldl"),
    "clang": ("-lpthread", "-ldl"),
    # The process that loads the library has libc already; zig would spend 40 s on building one.
    "zig": ("-nostdlib",),
}
_HOSTED_TARGET_FLAGS = {
    "gcc": (),
    "clang": (),
    "zig": ("-target", "x86_64-linux-gnu.2.28", "-fno-sanitize=undefined"),
}

_ELF = b"\x7fELF"
_ENDED_BY_SIGNAL = "signal terminated program"

_DIAGNOSTIC = re.compile(r"kernel\.c(?:pp)?:(?P<line>\d+):\d+: (?:fatal )?error: (?P<message>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A compiled kernel: its description, its source and its bytes."""

    artifact: Artifact
    source: Source
    binary: bytes


def compile_kernel(
    source: Source, *, isa: frozenset[IsaFeature], toolchain: Toolchain, is_afresh: bool = False
) -> Build:
    """Compile a generated kernel for exactly the features in `isa`, or take it from the cache.

    What is compiled `is_afresh` is not looked for there: whoever asks wants to know how long it
    takes. The same source, features and toolchain give the same bytes on every machine.

    Raises:
        CompilationFailed: the compiler refused the source.
        CompilationInterrupted: it was ended, ran too long, could not be run or had no space.
        StoreFailed: the build cache is not writable.
    """
    flags = compile_flags(isa, toolchain, keeps_roundings=source.keeps_roundings)
    command = [*toolchain.command, "-x", "c++", *flags, "-o", "kernel.so", "kernel.cpp"]
    _path, binary = _build_cached(
        source.text, "kernel.cpp", [command], toolchain, is_afresh=is_afresh
    )
    artifact = Artifact(
        sha256=sha256(binary).hexdigest(),
        size_bytes=len(binary),
        abi_version=source.abi_version,
        required_isa=isa,
        toolchain=toolchain.text,
        source_sha256=source.sha256,
        flags=flags,
    )
    return Build(artifact=artifact, source=source, binary=binary)


def compile_flags(
    isa: frozenset[IsaFeature], toolchain: Toolchain, *, keeps_roundings: bool = False
) -> tuple[str, ...]:
    """Return the flags with which a compiler is called for a kernel that needs `isa`."""
    contract = _KEEPS_ROUNDINGS if keeps_roundings else _FUSES
    return (
        *(contract if flag is _FUSES else flag for flag in _KERNEL_FLAGS),
        *_TOOLCHAIN_FLAGS[toolchain.name],
        *_feature_flags(isa, toolchain),
    )


def has_flags_of_old() -> bool:
    """Return whether kernels still have the flags of the time when records did not name them."""
    return identity([_KERNEL_FLAGS, _TOOLCHAIN_FLAGS]) == _FLAGS_OF_OLD


def compile_kernels(
    sources: Iterable[tuple[Source, frozenset[IsaFeature]]], *, toolchain: Toolchain
) -> list[Build | CompilationFailed | CompilationInterrupted]:
    """Compile several kernels at once, one process on each usable core, in the given order.

    A source that was not compiled has the reason in its place.
    """

    def attempt(
        item: tuple[Source, frozenset[IsaFeature]],
    ) -> Build | CompilationFailed | CompilationInterrupted:
        source, isa = item
        try:
            return compile_kernel(source, isa=isa, toolchain=toolchain)
        except (CompilationFailed, CompilationInterrupted) as failure:
            return failure

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(attempt, sources))


def compile_hosted(
    source_text: str,
    *,
    name: str,
    toolchain: Toolchain,
    isa: frozenset[IsaFeature] = frozenset(),
    libraries: tuple[str, ...] = (),
) -> Path:
    """Compile a C source that uses libc, threads and dlopen; return the path of the library.

    It is linked with `libraries`, named without `lib` and ending. Of processes that want it at
    once, one compiles it.

    Raises:
        CompilationFailed: the compiler refused the source.
        CompilationInterrupted: it was ended, ran too long, could not be run or had no space.
        StoreFailed: the build cache is not writable.
    """
    target = _HOSTED_TARGET_FLAGS[toolchain.name]
    features = _feature_flags(isa, toolchain)
    compiler = [*toolchain.command, *target]
    linked = (*(f"-l{library}" for library in libraries), *_HOSTED_LINK_FLAGS[toolchain.name])
    commands = [
        [*compiler, "-x", "c", *_HOSTED_FLAGS, *features, "-c", "-o", "kernel.o", "kernel.c"],
        [*compiler, "-shared", "-o", "kernel.so", "kernel.o", *linked],
    ]
    path = _cached_at(source_text, commands, toolchain, name)
    if read_build(path) is None:
        with building(name, COMPILE_TIMEOUT_S):
            _build_cached(source_text, "kernel.c", commands, toolchain, label=name)
    return path


def _feature_flags(isa: frozenset[IsaFeature], toolchain: Toolchain) -> list[str]:
    needed = isa - _SUPERFLUOUS.get(toolchain.name, frozenset())
    return sorted(_FEATURE_FLAGS[feature] for feature in needed)


def _build_cached(
    text: str,
    file_name: str,
    commands: list[list[str]],
    toolchain: Toolchain,
    label: str = "kernel",
    *,
    is_afresh: bool = False,
) -> tuple[Path, bytes]:
    """Return where the library is in the cache, and its bytes; one that was changed is replaced."""
    target = _cached_at(text, commands, toolchain, label)
    binary = None if is_afresh else read_build(target)
    if binary is None:
        binary = _build(text, file_name, commands, toolchain)
        write_build(target, binary)
    return target, binary


def _cached_at(text: str, commands: list[list[str]], toolchain: Toolchain, label: str) -> Path:
    """Return where the library is, or will be, in the cache."""
    arguments = [command[len(toolchain.command) :] for command in commands]
    key = identity([text, arguments, toolchain.text])
    return build_cache_dir() / f"{label}-{key}.so"


def _build(text: str, file_name: str, commands: list[list[str]], toolchain: Toolchain) -> bytes:
    try:
        with scratch_folder("gemm-tuner-build-") as work:
            (work / file_name).write_text(text)
            for command in commands:
                status, diagnostics = _run(command, work, toolchain)
                if status != 0:
                    raise CompilationFailed(_explain(diagnostics, text, toolchain))
            return _library_in(work, toolchain)
    except OSError as error:
        raise CompilationInterrupted(
            f"{toolchain.text} has no place to work: {error}; free some space, "
            "or set TMPDIR to another folder."
        ) from error


def _library_in(work: Path, toolchain: Toolchain) -> bytes:
    """Return what a compiler made. It had the folder for its own, and may have left anything."""
    try:
        library = read_bounded(work / "kernel.so", MAX_BUILD_BYTES, follows_links=False)
    except OSError as error:
        raise CompilationFailed(f"{toolchain.text} left no library: {error}") from error
    if not library.startswith(_ELF):
        raise CompilationFailed(
            f"{toolchain.text} left no library, but {len(library)} bytes that begin with "
            f"{library[: len(_ELF)]!r}; try another compiler."
        )
    return library


def _run(command: list[str], work: Path, toolchain: Toolchain) -> tuple[int, str]:
    """Return the status of a compiler and what it said, out of reach of a Ctrl-C."""
    zig_cache = build_cache_dir() / "zig"
    if toolchain.name == "zig":
        zig_cache.mkdir(exist_ok=True)
    writable = [work, zig_cache] if toolchain.name == "zig" else [work]
    with tempfile.TemporaryFile() as said:  # a pipe would have no bound
        try:
            process = start_session(
                confined(command, limits=_LIMITS, visible=_in_path(), writable=writable),
                cwd=work,
                env=_scrubbed_environment(work),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        except OSError as error:
            raise CompilationInterrupted(
                f"{toolchain.text} could not be run: {error}; try another compiler."
            ) from error
        with process:
            try:
                wait_for_session(process, COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise CompilationInterrupted(
                    f"{toolchain.text} did not finish within {COMPILE_TIMEOUT_S} s of its own; "
                    "try another compiler."
                ) from None
            except BaseException:  # a second Ctrl-C: nothing else would end the compiler
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        diagnostics = _ends_of(said)
    refusal = why_refused(process.returncode, diagnostics)
    if refusal is not None:
        raise CompilationInterrupted(
            f"{toolchain.text} could not be run: {refusal}; try another compiler."
        )
    # A driver says so when the compiler proper was ended by a signal.
    if process.returncode < 0 or _ENDED_BY_SIGNAL in diagnostics:
        raise CompilationInterrupted(
            f"{toolchain.text} was ended by a signal: {diagnostics.strip()[-200:]}; run it again."
        )
    if os.strerror(errno.ENOSPC) in diagnostics:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))
    return process.returncode, diagnostics


def _ends_of(file: BinaryIO) -> str:
    """Return what a file begins with and, where it is long, what it ends with."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    content = file.read(_MOST_SAID_BYTES)
    file.seek(max(len(content), size - _MOST_SAID_BYTES))
    return (content + file.read(_MOST_SAID_BYTES)).decode(errors="replace")


def _in_path() -> list[str]:
    """Return where a compiler looks for its assembler and linker."""
    return [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder]


def _scrubbed_environment(work: Path) -> dict[str, str]:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "TMPDIR": str(work),
        "HOME": str(work),
    }
    zig_cache = str(build_cache_dir() / "zig")
    environment["ZIG_GLOBAL_CACHE_DIR"] = zig_cache
    environment["ZIG_LOCAL_CACHE_DIR"] = str(work / "zig")
    return environment


def _explain(diagnostics: str, text: str, toolchain: Toolchain) -> str:
    """Return the first error beside the line of the generated source that it speaks of."""
    match = _DIAGNOSTIC.search(diagnostics)
    if match is None:
        tail = "\n".join(diagnostics.strip().splitlines()[-5:])
        return f"{toolchain.text} failed:\n{tail}"
    number = int(match["line"])
    lines = text.splitlines()
    around = range(max(1, number - 2), min(len(lines), number + 2) + 1)
    excerpt = "\n".join(
        f"{'>' if shown == number else ' '} {shown:5} | {lines[shown - 1]}" for shown in around
    )
    return f"{toolchain.text}: {match['message']} at line {number} of the source:\n{excerpt}"
