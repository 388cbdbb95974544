"""The small C programs of native/: built where a trial starts, loaded where it runs."""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.build.compile import compile_hosted
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.errors import CompilationFailed, PreparationStopped
from gemm_tuner.resources import (
    bench_native_dir,
    call_native_dir,
    library_native_dir,
    templates_dir,
)

# Debian has them for linking only, not for loading.
_LIBXSMM = ("xsmm", "xsmmnoblas")
_INCLUDE = re.compile(r'^#include (?:"([\w.]+)"|<(gemm_tuner\.h)>)$', re.MULTILINE)


class SampleStruct(ctypes.Structure):
    """`bench_sample`: the time of a number of calls, and what disturbed it."""

    _fields_ = (("elapsed_ns", ctypes.c_int64), ("involuntary_switches", ctypes.c_int64))


class WeightsStruct(ctypes.Structure):
    """`bench_weights`: the copies of the weights that calls rotate over."""

    _fields_ = (
        ("copies", ctypes.POINTER(ctypes.c_void_p)),
        ("count", ctypes.c_int64),
        ("next", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """The built libraries of the drivers that trials need.

    `libxsmm` is None if it was not asked for, or if the library is not installed.
    """

    crash: Path
    timer: Path
    onednn: Path
    openblas: Path
    mkl: Path
    libxsmm: Path | None
    roofline: Path
    finish: Path
    fixed_order: Path


def build_drivers(
    toolchain: Toolchain,
    cpu: Cpu,
    *,
    baselines: Sequence[str] = (),
    is_stopped: Callable[[], bool] = lambda: False,
) -> Drivers:
    """Build the drivers, or take them from the cache.

    Args:
        toolchain: compiles them.
        cpu: where they will run.
        baselines: the names of those to be used.
        is_stopped: whether nobody waits any more; asked before each.

    Raises:
        CompilationFailed: the compiler refused a driver.
        PreparationStopped: it `is_stopped`.
        StoreFailed: the build cache is not writable.
    """

    def compiler() -> Toolchain:
        """Return what compiles the next driver."""
        if is_stopped():
            raise PreparationStopped("what trials need is compiled no more.")
        return toolchain

    return Drivers(
        crash=build_driver("crash", compiler()),
        timer=build_timer(compiler()),
        onednn=build_driver("onednn", compiler(), "sample.h"),
        openblas=build_driver("openblas", compiler(), "sample.h"),
        mkl=build_driver("mkl", compiler(), "sample.h"),
        libxsmm=_build_libxsmm(compiler()) if "libxsmm" in baselines else None,
        roofline=build_driver("roofline", compiler(), "sample.h", isa=widest_vectors(cpu.isa)),
        finish=_build_finish(compiler(), cpu),
        fixed_order=build_fixed_order(compiler()),
    )


def widest_vectors(usable: frozenset[IsaFeature]) -> frozenset[IsaFeature]:
    """Return the features to compile a loop for that shall do as much as possible."""
    for vectors, products in (
        (
            {IsaFeature.AVX512F, IsaFeature.FMA},
            {
                IsaFeature.AVX512_BF16,
                IsaFeature.AVX512_VNNI,
                IsaFeature.AMX_TILE,
                IsaFeature.AMX_BF16,
                IsaFeature.AMX_INT8,
            },
        ),
        ({IsaFeature.AVX2, IsaFeature.FMA}, {IsaFeature.AVX_VNNI}),
    ):
        if vectors <= usable:
            return frozenset(vectors | (products & usable))
    return frozenset()


def build_driver(
    name: str,
    toolchain: Toolchain,
    *headers: str,
    isa: frozenset[IsaFeature] = frozenset(),
    libraries: tuple[str, ...] = (),
) -> Path:
    """Build native/`name`.c after the texts of its headers; return the library's path."""
    text = _texts(*headers, f"{name}.c")
    return compile_hosted(
        text, name=f"bench-{name}", toolchain=toolchain, isa=isa, libraries=libraries
    )


def build_timer(toolchain: Toolchain) -> Path:
    """Build native/timer.c with the pool of threads that calls from Python have."""
    pool = _with_headers(call_native_dir() / "pool.c", templates_dir() / "abi")
    text = "\n".join(("#define _GNU_SOURCE", pool, _texts("sample.h", "timer.c")))
    return compile_hosted(text, name="bench-timer", toolchain=toolchain)


def _build_finish(toolchain: Toolchain, cpu: Cpu) -> Path:
    """Build the pass after products, for the features of this CPU."""
    return compile_hosted(
        f"#define ONE_LEVEL\n{_with_headers(library_native_dir() / 'finish.c')}",
        name="bench-finish",
        toolchain=toolchain,
        isa=widest_vectors(cpu.isa),
    )


def build_fixed_order(toolchain: Toolchain) -> Path:
    """Build the definition of a fixed order of additions, for any CPU; return the library's path.

    Raises:
        CompilationFailed: the compiler refused it.
        StoreFailed: the build cache is not writable.
    """
    source = (library_native_dir() / "fixed_order.c").read_text()
    return compile_hosted(source, name="bench-fixed-order", toolchain=toolchain)


def _texts(*files: str) -> str:
    return "\n".join((bench_native_dir() / file).read_text() for file in files)


def _with_headers(source: Path, *folders: Path) -> str:
    """Return the text of a C file in which the text of each header of ours stands for its include.

    So what is compiled is one file, by whose text the build cache finds it. The headers lie beside
    the source or in `folders`, and guard themselves against being included twice.
    """

    def text_of(include: re.Match[str]) -> str:
        name = include[1] or include[2]
        places = (folder / name for folder in (source.parent, *folders))
        return _with_headers(next(filter(Path.is_file, places)), *folders)

    return _INCLUDE.sub(text_of, source.read_text())


def _build_libxsmm(toolchain: Toolchain) -> Path | None:
    """Return the driver with the library inside it, or None where the compiler finds no library."""
    try:
        return build_driver("libxsmm", toolchain, "sample.h", libraries=_LIBXSMM)
    except CompilationFailed:
        return None
