"""Time the packing of weights beside a copy of the same bytes, and print a table.

    python benchmarks/packing.py

    python benchmarks/packing.py w4 kn 4096x4096

    python benchmarks/packing.py cached

The bytes are those that packing reads and writes, half of them read: scales and zero points of
weights in groups, sums of columns and padding count. Weights are packed once, when they come from
memory, so both walk over so many blocks that no cache holds any, read and written, each four times
the last-level cache in all. The memory was touched before, is in huge pages, and both take turns.
Words choose the rows that hold them all; a word such as 4096x4096 chooses a size, n by k of f32 and
as many bytes of the others. With the word `cached`, one block is packed and copied again and again,
to look at what the instructions alone take. The exit code is 1 if packing takes more than three
times as long as copying anywhere.
"""

import ctypes
import sys
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ALIGNMENT_BYTES, WeightsStruct, make_weights
from gemm_tuner.build.compile import compile_hosted, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import parse_isa
from gemm_tuner.domain.dtype import OperandTypes
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned
from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

SLOWEST = 3.0
ROUNDS = 5
POOL_OVER_L3 = 4
UNKNOWN_L3_BYTES = 32 << 20
CACHED_BYTES = 8 << 20
PAGE_BYTES = 4 << 10
# Weights, scales and zero points of any type are ordinary numbers, and fit into 4 bits.
FILL = 15

HEADER = (templates_dir() / "abi" / "gemm_tuner.h").read_text()
DRIVER = """
#include <string.h>
#include <time.h>

typedef int32_t (*pack_function)(const gemm_tuner_weights *weights, void *packed_w);

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int64_t time_pack(pack_function pack, const gemm_tuner_weights *weights, char *to, int64_t stride,
                  int64_t blocks, int64_t calls)
{
    const int64_t start = now_ns();
    for (int64_t call = 0; call < calls; ++call)
        if (pack(weights + call % blocks, to + call % blocks * stride) != 0)
            return -1;
    return now_ns() - start;
}

int64_t time_copy(const char *from, char *to, uint64_t size_bytes, int64_t stride, int64_t blocks,
                  int64_t calls)
{
    const int64_t start = now_ns();
    for (int64_t call = 0; call < calls; ++call)
    {
        memcpy(to + call % blocks * stride, from + call % blocks * stride, size_bytes);
        __asm__ volatile("" : : "r"(to) : "memory");
    }
    return now_ns() - start;
}
"""

# Families with a tile, and the types of a problem for them, with the size of a group of weights.
# fmt: off
TILES = (
    ("f32",           "avx512_f32_4x16"),
    ("f32",           "avx512_f32_4x48"),
    ("f32",           "avx512_f32_2x64"),
    ("f32",           "avx512_f32_2x112"),
    ("f32",           "avx2_f32_2x16"),
    ("f32",           "avx512_f32_dot_1x4"),
    ("bf16",          "avx512_bf16_4x16"),
    ("bf16",          "avx512_bf16_4x48"),
    ("bf16",          "avx512_bf16_2x64"),
    ("bf16",          "avx512_bf16_by_f32_4x48"),
    ("bf16",          "avx2_bf16_by_f32_2x16"),
    ("u8_s8_s32_f32", "avx512_int8_4x48"),
    ("s8_s8_s32_f32", "avx512_int8_4x16"),
    ("s8_s8_s32_f32", "avx512_int8_4x48"),
    ("s8_s8_s32_f32", "avx512_int8_2x64"),
    ("s8_s8_s32_f32", "avx_vnni_int8_2x16"),
    ("s8_s8_s32_f32", "avx512_int8_dot_1x4"),
    ("s8_s8_s32_f32", "avx2_int8_dot_1x4"),
    ("f16",           "avx512_f16_by_f32_4x48"),
    ("f16",           "avx512_f16_dot_1x4"),
    ("f16",           "avx2_f16_by_f32_2x16"),
    ("bf16",          "amx_bf16_16x32"),
    ("s8_s8_s32_f32", "amx_int8_16x32"),
    ("f32_s8:g128",   "avx512_w8_1x32"),
    ("f32_u8:g32",    "avx512_w8_4x48"),
    ("bf16_s8:g64",   "avx512_bf16_w8_4x48"),
    ("bf16_u8:g32",   "amx_bf16_w8_16x32"),
    ("f32_s4:g128",   "avx512_w4_1x32"),
    ("f32_u4:g32",    "avx512_w4_4x48"),
    ("bf16_s4:g64",   "avx512_bf16_w4_4x48"),
    ("bf16_u4:g32",   "amx_bf16_w4_16x32"),
    ("f32_s8:g128",   "avx2_w8_2x16"),
    ("f32_u8:g32",    "avx2_w8_2x16"),
    ("f32_s4:g128",   "avx2_w4_2x16"),
    ("f32_u4:g32",    "avx2_w4_2x16"),
    ("f32",           "scalar_f32_4x2"),
    ("f32",           "scalar_f32_1x8"),
    ("bf16",          "scalar_bf16_2x4"),
    ("bf16",          "scalar_bf16_1x8"),
    ("s8_s8_s32_f32", "scalar_int8_1x1"),
    ("s8_s8_s32_f32", "scalar_int8_1x8"),
    ("f32_s8:g128",   "scalar_w8_1x8"),
    ("f32_u4:g32",    "scalar_w4_1x8"),
)
# fmt: on
SIZES = ((128, 128), (512, 512), (768, 3072), (2048, 2048), (4096, 4096), (11008, 4096))
# What kernels need that packing does not.
NOT_FOR_PACKING = parse_isa(("amx_tile", "amx_bf16", "amx_int8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The times of one kernel's packing and of the copy, in ns, in the same rounds."""

    name: str
    size_bytes: int
    pack_ns: tuple[float, ...]
    copy_ns: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Return how many times as long as the copy packing takes."""
        return median(p / c for p, c in zip(self.pack_ns, self.copy_ns, strict=True))


def main(words: list[str]) -> int:
    """Print the table of the rows that hold all of `words`, and return the exit code."""
    sizes = [(n, k) for n, k in SIZES if f"{n}x{k}" in words] or SIZES
    cached = "cached" in words
    words = [word for word in words if word not in {"cached", *(f"{n}x{k}" for n, k in SIZES)}]
    toolchain = find_toolchain()
    driver = ctypes.CDLL(
        str(compile_hosted(HEADER + DRIVER, name="bench-packing", toolchain=toolchain))
    )
    driver.time_pack.restype = driver.time_copy.restype = ctypes.c_int64
    slow = 0
    print(f"{'kernel':44} {'MB':>6} {'pack GB/s':>10} {'copy GB/s':>10} {'ratio':>6}")
    for (types, tile), layout in product(TILES, ("nk", "kn")):
        name = f"{tile} {types} {layout}"
        if not all(word in name for word in words):
            continue
        if family_named(tile.rpartition("_")[0]).isa - detect_cpu().isa - NOT_FOR_PACKING:
            continue
        for n, k in sizes:
            kernel = build(problem_of(types, n, k, layout), tile)
            row = time_packing(driver, kernel, name, cached=cached)
            slow += row.ratio > SLOWEST
            rates = (row.size_bytes / median(row.pack_ns), row.size_bytes / median(row.copy_ns))
            print(
                f"{row.name:44} {row.size_bytes / 2**20:6.2f} {rates[0]:10.1f} {rates[1]:10.1f} "
                f"{row.ratio:6.2f}{'  slow' if row.ratio > SLOWEST else ''}"
            )
    return 1 if slow else 0


def problem_of(types: str, n: int, k: int, layout: str) -> Problem:
    """Return a problem whose weights take as many bytes as n times k in f32."""
    types, _colon, group = types.partition(":")
    size_bits = OperandTypes.parse(types).w.size_bits
    return Problem.parse(f"{types} 4x{n}x{32 // size_bits * k} {layout}{_colon}{group}")


def build(problem: Problem, tile: str) -> Kernel:
    """Return the kernel of a tile with blocks of k that the problem's types allow."""
    kc = problem.k
    nr = int(tile.rpartition("x")[2])
    mr = int(tile.rpartition("_")[2].partition("x")[0])
    nc = -(-problem.n // nr) * nr
    mc = -(-4 // mr) * mr
    candidate = Candidate.parse(f"{tile} mc{mc}_nc{nc}_kc{kc} jc_ic_jr_ir")
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    built = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    cpu = detect_cpu()
    cpu = replace(cpu, isa=cpu.isa | NOT_FOR_PACKING)
    return load_kernel(built.binary, artifact=built.artifact, cpu=cpu)


def time_packing(driver: ctypes.CDLL, kernel: Kernel, name: str, *, cached: bool) -> Row:
    """Return the times of a kernel's packing and of a copy of as many bytes."""
    problem = kernel.problem
    packed_bytes = kernel.native.packed_weight_bytes
    size_bytes = (problem.w_bytes + packed_bytes) // 2
    stride = round_up(max(problem.w_bytes, packed_bytes) + 2 * ALIGNMENT_BYTES, PAGE_BYTES)
    pool_bytes = POOL_OVER_L3 * (detect_cpu().caches.l3_bytes or UNKNOWN_L3_BYTES)
    blocks = 1 if cached else -(-pool_bytes // stride)
    calls = max(blocks, CACHED_BYTES // size_bytes)
    source, target = allocate_aligned(blocks * stride), allocate_aligned(blocks * stride)
    source[:] = target[:] = FILL
    weights = (WeightsStruct * blocks)(
        *(weights_at(source[block * stride :], problem) for block in range(blocks))
    )
    shape = (ctypes.c_int64(stride), ctypes.c_int64(blocks), ctypes.c_int64(calls))

    def pack_ns() -> float:
        elapsed: int = driver.time_pack(
            ctypes.c_void_p(kernel.native.pack_address), weights,
            ctypes.c_void_p(address_of(target)), *shape,
        )  # fmt: skip
        assert elapsed > 0, "the weights were refused"
        return elapsed / calls

    def copy_ns() -> float:
        elapsed: int = driver.time_copy(
            ctypes.c_void_p(address_of(source)), ctypes.c_void_p(address_of(target)),
            ctypes.c_uint64(size_bytes), *shape,
        )  # fmt: skip
        return elapsed / calls

    pack_ns(), copy_ns()
    rounds = [(pack_ns(), copy_ns()) for _round in range(ROUNDS)]
    packs, copies = zip(*rounds, strict=True)
    return Row(name=name, size_bytes=size_bytes, pack_ns=packs, copy_ns=copies)


def weights_at(block: NDArray[np.uint8], problem: Problem) -> WeightsStruct:
    """Return the weights at the start of a block: elements, scales and zero points."""
    element_bytes = problem.n * problem.k * problem.types.w.size_bits // 8
    scales_at = round_up(element_bytes, ALIGNMENT_BYTES)
    zero_points_at = round_up(scales_at + 4 * problem.n * problem.w_groups, ALIGNMENT_BYTES)
    return make_weights(
        address_of(block),
        problem.w_shape[1],
        scales=address_of(block[scales_at:]) if problem.types.is_weight_only else 0,
        zero_points=address_of(block[zero_points_at:]) if problem.has_zero_points else 0,
    )


def round_up(size: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-size // step) * step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
