"""One artifact under three pools: ours, OpenMP, and the one of PyTorch's operators."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from grids import grid_toolchain
from needs import need_compiler
from numpy.typing import NDArray

from gemm_tuner.abi import OK, ArgsStruct, KernelLibrary
from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime import load
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

PROBLEM = Problem.parse("f32 37x50x33 nk bias+gelu_erf")
# In one phase, and in two: with k in slices, whose sums the second phase adds up.
CANDIDATES = (
    "scalar_f32_2x2 mc8_nc12_kc11 jc_ic_jr_ir pack_x grid2x2",
    "scalar_f32_2x2 mc8_nc12_kc11 jc_ic_jr_ir grid2x1x3",
)

PARTS = (1, 2, 3, 4, 7, 64)
POOL_THREADS = 4

OPENMP = """
#include "gemm_tuner.h"
#include <omp.h>
typedef int32_t (*run_function)(const gemm_tuner_args *, int32_t, int32_t, int32_t);
extern "C" int32_t run_parts(run_function run, const gemm_tuner_args *args, int32_t phases,
                             int32_t parts, int32_t threads) {
    int32_t status = GEMM_TUNER_OK;
    for (int32_t phase = 0; phase < phases; phase++) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : status)
        for (int32_t part = 0; part < parts; part++) {
            status |= run(args, phase, part, parts);
        }
    }
    return status;
}
"""

TORCH = """
#include "gemm_tuner.h"
#include <ATen/Parallel.h>
#include <atomic>
typedef int32_t (*run_function)(const gemm_tuner_args *, int32_t, int32_t, int32_t);
extern "C" int32_t run_parts(run_function run, const gemm_tuner_args *args, int32_t phases,
                             int32_t parts, int32_t threads) {
    at::set_num_threads(threads);
    std::atomic<int32_t> status{GEMM_TUNER_OK};
    for (int32_t phase = 0; phase < phases; phase++) {
        at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
            for (int64_t part = begin; part < end; part++) {
                status |= run(args, phase, int32_t(part), parts);
            }
        });
    }
    return status;
}
"""

Run = Callable[[KernelLibrary, ArgsStruct, int, int], bool]


@pytest.fixture(scope="module", params=CANDIDATES, ids=["one phase", "two phases"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    candidate = Candidate.parse(request.param)
    family = family_named(candidate.micro_kernel.family)
    source = render(PROBLEM, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=grid_toolchain(as_served=False))
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    assert kernel.native.phases == (2 if candidate.blocking.grid_k > 1 else 1)
    return kernel


@pytest.fixture(scope="module")
def openmp(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return _compile(OPENMP, tmp_path_factory.mktemp("openmp"), "-fopenmp")


@pytest.fixture(scope="module")
def pytorch(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    home = Path(torch.__file__).parent
    flags = ["-std=c++20", "-fopenmp", "-isystem", str(home / "include"), "-L", str(home / "lib")]
    libraries = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    return _compile(TORCH, tmp_path_factory.mktemp("pytorch"), *flags, *libraries)


def _compile(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    (folder / "pool.cpp").write_text(source)
    compiler = need_compiler("gcc").command
    include = ["-I", str(templates_dir() / "abi")]
    library = folder / "pool.so"
    command = [*compiler, "-O1", "-shared", "-fPIC", *include, "pool.cpp", "-o", str(library)]
    subprocess.run([*command, *flags], cwd=folder, check=True)
    return ctypes.CDLL(str(library))


def _run_with(pool: ctypes.CDLL) -> Run:
    def run(library: KernelLibrary, args: ArgsStruct, parts: int, _threads: int) -> bool:
        status = pool.run_parts(
            ctypes.c_void_p(library.run_address),
            ctypes.byref(args),
            library.phases,
            parts,
            POOL_THREADS,
        )
        return bool(status == OK)

    return run


def _in_order(library: KernelLibrary, args: ArgsStruct, parts: int, _threads: int) -> bool:
    return all(
        library.run(args, phase, part, parts) == OK
        for phase in range(library.phases)
        for part in range(parts)
    )


def _backwards(library: KernelLibrary, args: ArgsStruct, parts: int, _threads: int) -> bool:
    return all(
        library.run(args, phase, part, parts) == OK
        for phase in range(library.phases)
        for part in reversed(range(parts))
    )


def _results(kernel: Kernel, run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[int, bytes]:
    monkeypatch.setattr(load, "run_parts", run)
    x, packed, bias = _inputs(kernel)
    return {parts: kernel.compute(x, packed, threads=parts, bias=bias).tobytes() for parts in PARTS}


def _inputs(kernel: Kernel) -> tuple[NDArray[np.float32], PackedWeights, NDArray[np.float32]]:
    rng = np.random.default_rng(20_261)
    x = rng.standard_normal((PROBLEM.m.high, PROBLEM.k), np.float32)
    w = rng.standard_normal((PROBLEM.n, PROBLEM.k), np.float32)
    return x, kernel.pack(w), rng.standard_normal(PROBLEM.n, np.float32)


def test_our_pool_gives_the_bits_of_one_thread(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, packed, bias = _inputs(kernel)

    shared = {parts: kernel(x, packed, threads=parts, bias=bias).tobytes() for parts in PARTS}

    assert shared == _results(kernel, _in_order, monkeypatch)


def test_order_of_the_parts_does_not_matter(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = _results(kernel, _backwards, monkeypatch)

    assert backwards == _results(kernel, _in_order, monkeypatch)


def test_openmp_gives_the_bits_of_one_thread(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, openmp: ctypes.CDLL
) -> None:
    shared = _results(kernel, _run_with(openmp), monkeypatch)

    assert shared == _results(kernel, _in_order, monkeypatch)


@pytest.mark.proof
def test_pytorchs_pool_gives_the_bits_of_one_thread(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, pytorch: ctypes.CDLL
) -> None:
    shared = _results(kernel, _run_with(pytorch), monkeypatch)

    assert shared == _results(kernel, _in_order, monkeypatch)
