"""Compile a C++ source against the headers of a program that loads it, such as PyTorch."""

from pathlib import Path

from gemm_tuner.build.compile import _build_cached
from gemm_tuner.build.toolchain import Toolchain

_FLAGS = (
    *("-x", "c++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra"),
)


def compile_extension(
    source_text: str,
    *,
    name: str,
    toolchain: Toolchain,
    include: Path,
    library_dir: Path,
    libraries: tuple[str, ...],
    made_for: str,
) -> Path:
    """Return the path of the library, compiled or from the cache.

    Args:
        source_text: the source.
        name: what its file is called in the cache.
        toolchain: gcc or clang, whose C++ library is that of the program.
        include: the folder of the program's headers.
        library_dir: the folder of its libraries.
        libraries: those to link with, named without `lib` and ending.
        made_for: the program and its version; another one gets a library of its own.

    Raises:
        CompilationFailed: the compiler refused the source.
        CompilationInterrupted: it was ended, ran too long, could not be run or had no space.
        StoreFailed: the build cache is not writable.
    """
    linked = [f"-L{library_dir}", *(f"-l{library}" for library in libraries)]
    compiler = [*toolchain.command, *_FLAGS, "-isystem", str(include)]
    command = [*compiler, "-o", "kernel.so", "kernel.cpp", *linked]
    text = f"// For {made_for}.\n{source_text}"
    path, _binary = _build_cached(text, "kernel.cpp", [command], toolchain, label=name)
    return path
