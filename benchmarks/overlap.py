"""Print how far reading and multiplying overlap in loops that do nothing else.

    python benchmarks/overlap.py

    python benchmarks/overlap.py 16 32 80

Each loop reads as many MB of weights again and again (32 if no number is given: 4096 x 4096 of
bf16) and multiplies each cache line with some rows of x by the instruction for bf16, from one
place or from two side by side, with and without software prefetch. There is no packing, no tail,
no epilogue and no block: a kernel of the same tile that reads alike is hardly faster. A loop of no
rows reads alone. All loops take turns. The table gives the share of the roofline, which is the
longer of a plain read and of the same multiplications with weights in L2: medians over the rounds.
It needs AVX512-BF16; be alone on the machine.
"""

import ctypes
import sys
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.build.compile import compile_hosted
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import parse_isa
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned

ISA = parse_isa(("avx512f", "avx512_bf16"))
LINE_BYTES = 64
PAIRS = 1024  # of steps of k, in a tile
IN_L2_BYTES = 512 << 10
ROUNDS = 15
WARM_UP_CALLS = TIMED_CALLS = 4
# Rows, and the vectors of a tile beside so many, whose sums stay in registers.
TILES = ((0, 8), (1, 8), (2, 8), (3, 8), (4, 2), (6, 2), (8, 2))


@dataclass(frozen=True, slots=True)
class Way:
    """From how many places to read, and how many bytes ahead to fetch into which cache."""

    places: int = 1
    ahead_bytes: int = 0
    level: int = 0

    @property
    def text(self) -> str:
        """Return a heading of the table."""
        if self.ahead_bytes:
            return f"{self.ahead_bytes >> 10} KB L{self.level}"
        return "plain" if self.places == 1 else f"{self.places} places"


WAYS = (
    Way(),
    Way(places=2),
    *(Way(ahead_bytes=ahead, level=level) for level in (1, 2) for ahead in (1024, 4096, 16384)),
)

HEAD = """
#include <immintrin.h>
#include <stdint.h>
#include <time.h>

enum { PAIRS = %(pairs)d, LINE_BYTES = %(line)d };

typedef void (*loop)(const char *w, int64_t size_bytes);

static uint32_t x[8][PAIRS]; /* pairs of ones */
static volatile float sink;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int64_t time_loop(loop run, const char *w, int64_t size_bytes, int64_t calls)
{
    for (int i = 0; i < 8 * PAIRS; ++i)
        x[0][i] = 0x3f803f80;
    const int64_t start = now_ns();
    for (int64_t call = 0; call < calls; ++call)
        run(w, size_bytes);
    return now_ns() - start;
}
"""

LOOP = """
void %(name)s(const char *w, int64_t size_bytes)
{
    enum { ROWS = %(rows)d, PLACES = %(places)d, EACH = %(each)d, VECTORS = PLACES * EACH };
    const int64_t panel = (int64_t)PAIRS * EACH * LINE_BYTES;
    float total = 0;
    for (; size_bytes > 0; size_bytes -= panel * PLACES, w += panel * PLACES)
    {
        __m512 sums[ROWS + 1][VECTORS];
#pragma GCC unroll 64
        for (int i = 0; i < (ROWS + 1) * VECTORS; ++i)
            sums[i / VECTORS][i %% VECTORS] = _mm512_setzero_ps();
        for (int k = 0; k < PAIRS; ++k)
        {
            __m512i lines[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
            {
                const char *line = w + v / EACH * panel + (k * EACH + v %% EACH) * LINE_BYTES;
                lines[v] = _mm512_load_si512(line);
                %(prefetch)s
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS && ROWS == 0; ++v)
                sums[0][v] = _mm512_castsi512_ps(
                    _mm512_xor_si512(_mm512_castps_si512(sums[0][v]), lines[v]));
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)_mm512_set1_epi32(x[r][k]),
                                                  (__m512bh)lines[v]);
        }
#pragma GCC unroll 64
        for (int i = 0; i < (ROWS + 1) * VECTORS; ++i)
            total += _mm512_cvtss_f32(sums[i / VECTORS][i %% VECTORS]);
    }
    sink = total;
}
"""


def main(words: list[str]) -> int:
    """Print a table for each number of MB, and return the exit code."""
    if missing := ISA - detect_cpu().isa:
        print(f"this CPU lacks {sorted(missing)}", file=sys.stderr)
        return 2
    text = HEAD % {"pairs": PAIRS, "line": LINE_BYTES}
    text += "".join(source_of(rows, vectors, way) for rows, vectors in TILES for way in WAYS)
    toolchain = find_toolchain()
    driver = ctypes.CDLL(
        str(compile_hosted(text, name="bench-overlap", toolchain=toolchain, isa=ISA))
    )
    driver.time_loop.restype = ctypes.c_int64
    for megabytes in map(int, words or ["32"]):
        weights = allocate_aligned(megabytes << 20)
        weights[:] = 0
        print_shares(driver, weights)
    return 0


def name_of(rows: int, way: Way) -> str:
    """Return the name of a loop in C."""
    return f"loop_{rows}_{way.places}_{way.ahead_bytes}_{way.level}"


def source_of(rows: int, vectors: int, way: Way) -> str:
    """Return a loop in C."""
    fetch = f"_mm_prefetch(line + {way.ahead_bytes}, _MM_HINT_T{way.level - 1});"
    return LOOP % {
        "name": name_of(rows, way),
        "rows": rows,
        "places": way.places,
        "each": vectors // way.places,
        "prefetch": fetch if way.ahead_bytes else "",
    }


def print_shares(driver: ctypes.CDLL, weights: NDArray[np.uint8]) -> None:
    """Time all loops over the weights in turn, and print their shares of the roofline."""
    size = weights.nbytes
    parts = size // IN_L2_BYTES

    def time_us(rows: int, way: Way, size_bytes: int, calls: int) -> float:
        elapsed: int = driver.time_loop(
            getattr(driver, name_of(rows, way)), ctypes.c_void_p(address_of(weights)),
            ctypes.c_int64(size_bytes), ctypes.c_int64(calls),
        )  # fmt: skip
        return elapsed / calls / 1e3

    loops = [(rows, way) for rows, _vectors in TILES for way in WAYS]
    times: dict[tuple[int, Way], list[float]] = {loop: [] for loop in loops}
    multiplied: dict[int, list[float]] = {rows: [] for rows, _vectors in TILES}
    for turn in range(ROUNDS):
        for rows, taken in multiplied.items():
            in_l2_us = time_us(rows, WAYS[0], IN_L2_BYTES, calls=2 * parts)
            taken.append(parts * in_l2_us if rows else 0.0)
        for loop in loops[:: 1 if turn % 2 else -1]:
            time_us(*loop, size, WARM_UP_CALLS)
            times[loop].append(time_us(*loop, size, TIMED_CALLS))
    reads = times[0, WAYS[0]]
    print(f"{size >> 20} MB, read in {median(reads):.0f} us")
    print(f"{'rows':>4} {'multiplied':>11}" + "".join(f"{way.text:>11}" for way in WAYS))
    for rows, taken in multiplied.items():
        limits = [max(pair) for pair in zip(reads, taken, strict=True)]
        shares = "".join(f"{share(limits, times[rows, way]):11.2f}" for way in WAYS)
        print(f"{rows:4} {median(taken):8.0f} us{shares}")


def share(limits: list[float], times: list[float]) -> float:
    """Return the median of how much of each time its limit is."""
    return median(limit / took for limit, took in zip(limits, times, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
