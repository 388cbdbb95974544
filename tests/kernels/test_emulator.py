"""Each AMX instruction, against a model written from the manual.

A CPU with AMX executes them itself, and is compared with the model in the emulator's place.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from amx_model import bf16, f16, float_product, integer_product
from amx_programs import ADDRESSES, Programs, shapes
from amx_sandbox import Sandbox, open_sandbox
from numpy.typing import NDArray

from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.guard import Flush, GuardedMatrix
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.record import Outcome
from gemm_tuner.machine.detect import detect_cpu

USABLE = detect_cpu().isa
HAS_AMX = IsaFeature.AMX_TILE in USABLE
only_emulated = pytest.mark.skipif(HAS_AMX, reason="this CPU executes AMX by itself")
pytestmark = pytest.mark.isa("avx2", "fma")

FULL = (16, 64)
FLOATS = {"tdpbf16ps": bf16, "tdpfp16ps": f16}
FLOAT_PRODUCTS = [
    "tdpbf16ps",
    pytest.param(
        "tdpfp16ps",
        marks=pytest.mark.skipif(
            HAS_AMX and IsaFeature.AMX_FP16 not in USABLE,
            reason="this CPU has tiles of its own, and no products of f16 for them",
        ),
    ),
]
SIGNED = {
    "tdpbssd": (np.int8, np.int8),
    "tdpbsud": (np.int8, np.uint8),
    "tdpbusd": (np.uint8, np.int8),
    "tdpbuud": (np.uint8, np.uint8),
}
# Rows and columns of the sums, and groups of steps of k.
SHAPES = [(16, 16, 16), (5, 3, 7), (1, 16, 1), (16, 1, 16)]

# 16 numbers each: zeros, the least and greatest subnormal and normal ones, and what is none.
SPECIAL_BITS = {
    "tdpbf16ps": [
        0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x8080, 0x00FF, 0x1F80,
        0x2000, 0xA001, 0x3F80, 0xBF81, 0x5F80, 0x7F7F, 0x7F80, 0x7FC0,
    ],
    "tdpfp16ps": [
        0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400,
        0x07FF, 0x3C00, 0xBC01, 0x3BFF, 0x7BFF, 0xFBFF, 0xFC00, 0x7E00,
    ],
}  # fmt: skip
SPECIAL_SUMS = [0.0, -0.0, 1e-45, -1e-38, 2.0**-126, -(2.0**-126), 1.0, -1.0, 3e38, -np.inf]

# A program, the shapes it runs with, and what is said.
REFUSALS = [
    ("configure", shapes(FULL, palette=2), "the palette is neither 0 nor 1"),
    ("configure", shapes((17, 64)), "a tile has more than 16 rows"),
    ("configure", shapes((16, 68)), "a tile has rows of more than 64 bytes"),
    ("configure", shapes(FULL, (16, 0)), "a tile has rows of 0 bytes, or bytes but no rows"),
    ("configure", shapes(*[FULL] * 9), "a reserved byte is not 0"),
    ("zero_unconfigured", shapes(), "no tiles are configured"),
    ("load_unconfigured", shapes(), "no tiles are configured"),
    ("multiply_unconfigured", shapes(), "no tiles are configured"),
    ("store_tile_3", shapes(FULL, FULL, FULL), "a tile is not among those that are configured"),
    ("zero_tile_9", shapes(*[FULL] * 8), "there are only the tiles 0 to 7"),
    ("multiply_by_sums", shapes(FULL, FULL), "its three tiles are not three"),
    ("copy", shapes(*[(0, 0)] * 7, (5, 13)), "rows are not of whole groups of 4 bytes"),
    ("store", shapes((5, 14)), "rows are not of whole groups of 4 bytes"),
    ("multiply", shapes((4, 8), (4, 6), (2, 8)), "rows are not of whole groups of 4 bytes"),
    ("multiply", shapes((4, 8), (5, 8), (2, 8)), "have different numbers of rows"),
    ("multiply", shapes((4, 8), (4, 8), (2, 12)), "have rows of different lengths"),
    ("multiply", shapes((4, 8), (4, 8), (3, 8)), "rows of another length than the second has rows"),
]


@pytest.fixture(
    scope="module", params=["gcc", "clang", pytest.param("zig", marks=pytest.mark.proof)]
)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return open_sandbox(request.param)


@pytest.fixture
def programs(sandbox: Sandbox) -> Iterator[Programs]:
    """Emulate in this process."""
    sandbox.emulator.start(sandbox.report)
    yield sandbox.programs
    sandbox.emulator.stop()


def padded(matrix: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return the bytes of a matrix in 16 rows of 64 bytes, the others 0xAB."""
    rows = np.full((16, 64), 0xAB, np.uint8)
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
    rows[: len(raw), : raw.shape[1]] = raw
    return rows


def multiply(
    programs: Programs,
    name: str,
    sums: NDArray[np.generic],
    x: NDArray[np.generic],
    w: NDArray[np.generic],
) -> NDArray[np.uint8]:
    """Return the tile of the sums after a product, as 16 rows of 64 bytes."""
    memory = [padded(matrix) for matrix in (sums, x, w)]
    config = shapes(*((len(one), one.itemsize * one.shape[1]) for one in (sums, x, w)))
    after = np.zeros(64, np.uint8)

    programs.run(name, config, *(one.ctypes.data for one in memory), after.ctypes.data)

    assert np.array_equal(after, config)
    return memory[0]


def float_bits(
    generator: np.random.Generator, shape: tuple[int, int], bits: int
) -> NDArray[np.uint16]:
    """Return bits of numbers of all sizes, some of them 0 or subnormal, none infinite or NaN."""
    digits = generator.integers(0, 1 << 16, shape)
    exponent_bits = 15 - bits
    exponent = generator.integers(0, (1 << exponent_bits) - 1, shape)
    # Most are so near to 1 that sums are not those of the largest alone.
    bias = (1 << (exponent_bits - 1)) - 1
    near = generator.integers(bias - 6, bias + 6, shape)
    exponent = np.where(generator.random(shape) < 0.8, near, exponent)
    return ((digits & 0x8000) | exponent << bits | (digits & ((1 << bits) - 1))).astype(np.uint16)


@pytest.mark.parametrize("name", FLOAT_PRODUCTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_floats_is_that_of_the_manual(
    programs: Programs, name: str, shape: tuple[int, int, int]
) -> None:
    rows, columns, depth = shape
    generator = np.random.default_rng(20_261)
    bits = 7 if name == "tdpbf16ps" else 10
    sums = generator.standard_normal((rows, columns)).astype(np.float32)
    x = float_bits(generator, (rows, 2 * depth), bits)
    w = float_bits(generator, (depth, 2 * columns), bits)

    result = multiply(programs, name, sums, x, w)

    expected = float_product(sums, x, w, FLOATS[name])
    assert np.array_equal(result, padded(expected))


@pytest.mark.parametrize("name", FLOAT_PRODUCTS)
def test_numbers_at_the_ends_of_their_range_are_those_of_the_manual(
    programs: Programs, name: str
) -> None:
    special = np.array(SPECIAL_BITS[name], np.uint16)
    generator = np.random.default_rng(20_262)
    x = np.stack([special, generator.permutation(special)], axis=1)
    w = np.stack([special, generator.permutation(special)], axis=1).reshape(1, 32)
    sums = generator.choice(np.array(SPECIAL_SUMS, np.float32), (16, 16))

    result = multiply(programs, name, sums, x, w).view(np.float32)

    expected = float_product(sums, x, w, FLOATS[name])
    both_nan = np.isnan(result) & np.isnan(expected)
    assert both_nan.any()
    assert np.array_equal(result.view(np.uint32)[~both_nan], expected.view(np.uint32)[~both_nan])


def test_a_subnormal_sum_becomes_zero(programs: Programs) -> None:
    least = np.finfo(np.float32).smallest_normal
    sums = np.array([[-least, least, -least]], np.float32)
    x = np.array([[0x3F80, 0]], np.uint16)  # 1 and 0
    w = np.array(
        [[0x00FF, 0, 0x80FF, 0, 0x0080, 0]], np.uint16
    )  # nearly twice the least; the least

    result = multiply(programs, "tdpbf16ps", sums, x, w)

    assert result.view(np.uint32)[0, :3].tolist() == [0, 0x80000000, 0]


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_bytes_is_that_of_the_manual(
    programs: Programs, name: str, shape: tuple[int, int, int]
) -> None:
    rows, columns, depth = shape
    generator = np.random.default_rng(20_263)
    ends = np.iinfo(np.int32)
    sums = generator.integers(ends.min, ends.max, (rows, columns), np.int32, endpoint=True)
    x_type, w_type = SIGNED[name]
    x = generator.integers(0, 256, (rows, 4 * depth), np.uint8).view(x_type)
    w = generator.integers(0, 256, (depth, 4 * columns), np.uint8).view(w_type)

    result = multiply(programs, name, sums, x, w)

    assert np.array_equal(result, padded(integer_product(sums, x, w)))


def test_sums_of_bytes_wrap_around(programs: Programs) -> None:
    sums = np.array([[2**31 - 1, -(2**31)]], np.int32)
    x = np.array([[1, 0, 0, 0]], np.int8)
    w = np.array([[1, 0, 0, 0, -1, 0, 0, 0]], np.int8)

    result = multiply(programs, "tdpbssd", sums, x, w)

    assert result.view(np.int32)[0, :2].tolist() == [-(2**31), 2**31 - 1]


@pytest.mark.parametrize("name", ["copy", "copy_t1"])
@pytest.mark.parametrize("start_row", [0, 3])
def test_a_partial_tile_is_loaded_and_stored_from_its_start_row(
    programs: Programs, name: str, start_row: int
) -> None:
    generator = np.random.default_rng(20_264)
    source = generator.integers(1, 255, (16, 200), np.uint8)
    target = np.full((16, 200), 0xAB, np.uint8)
    config = shapes(*[(0, 0)] * 7, (5, 12), start_row=start_row)
    loaded, stored = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    addresses = (one.ctypes.data for one in (source, target, loaded, stored))

    programs.run(name, config, *addresses, stride_bytes=200)

    expected = np.full((16, 200), 0xAB, np.uint8)
    expected[:5, :12] = source[:5, :12]
    expected[:start_row, :12] = 0  # these rows were not loaded
    restarted = shapes(*[(0, 0)] * 7, (5, 12))
    assert np.array_equal(target, expected)
    assert np.array_equal(loaded, restarted)
    assert np.array_equal(stored, restarted)


def test_a_tile_is_stored_from_its_start_row(programs: Programs) -> None:
    target = np.full((16, 64), 0xAB, np.uint8)

    programs.run("store", shapes((5, 12), start_row=3), target.ctypes.data)

    assert np.array_equal(np.argwhere(target == 0), [(i, j) for i in (3, 4) for j in range(12)])


def test_rows_may_lie_backwards(programs: Programs) -> None:
    source = np.random.default_rng(20_265).integers(0, 255, (16, 64), np.uint8)
    target = np.zeros((16, 64), np.uint8)
    unused = np.zeros(64, np.uint8).ctypes.data
    last_rows = (source[15:].ctypes.data, target[15:].ctypes.data)

    programs.run("copy", shapes(*[FULL] * 8), *last_rows, unused, unused, stride_bytes=-64)

    assert np.array_equal(target, source)


@pytest.mark.parametrize("name", ["zero", "configure_again"])
def test_a_tile_is_zeroed(programs: Programs, name: str) -> None:
    source = np.random.default_rng(20_266).integers(1, 255, (16, 64), np.uint8)
    target = np.full((16, 64), 0xAB, np.uint8)
    unused = np.zeros(64, np.uint8).ctypes.data

    programs.run(name, shapes(*[FULL] * 8), source.ctypes.data, target.ctypes.data, unused, unused)

    assert not target.any()


def test_instructions_that_read_no_rows_forget_the_start_row(programs: Programs) -> None:
    for name in ("zero_from_start_row", "multiply_from_start_row"):
        after = np.full(64, 0xAB, np.uint8)

        programs.run(name, shapes(FULL, FULL, FULL, start_row=3), after.ctypes.data)

        assert np.array_equal(after, shapes(FULL, FULL, FULL)), name


def test_released_tiles_have_no_shapes(programs: Programs) -> None:
    before, after = np.full(64, 0xAB, np.uint8), np.full(64, 0xAB, np.uint8)
    config = shapes((3, 4), (16, 64), start_row=7)

    programs.run("release", config, 0, before.ctypes.data, 0, after.ctypes.data)

    assert np.array_equal(before, config)
    assert not after.any()


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_understood(programs: Programs, address: str) -> None:
    source = np.random.default_rng(20_267).integers(0, 255, (16, 64), np.uint8)
    target = np.zeros((16, 64), np.uint8)

    programs.run(f"address_{address}", shapes(*[FULL] * 8), source.ctypes.data, target.ctypes.data)

    expected = np.broadcast_to(source[0], source.shape) if address == "no_index" else source
    assert np.array_equal(target, expected)


def test_shapes_are_found_by_any_address(programs: Programs) -> None:
    memory, after = np.zeros(256, np.uint8), np.zeros(64, np.uint8)

    programs.run("configure_from_code", memory, 0, memory.ctypes.data, 0, after.ctypes.data)

    assert np.array_equal(memory[192:], shapes((5, 12)))
    assert np.array_equal(after, shapes((5, 12)))


@only_emulated
def test_neighbours_share_one_signal(programs: Programs) -> None:
    sums, factor = np.zeros((16, 16), np.float32), np.zeros((16, 32), np.uint16)
    programs.begin_to_count()

    multiply(programs, "tdpbf16ps", sums, factor, factor)  # eight instructions

    assert programs.end_to_count() == 1


def test_an_emulator_starts_again_behind_another_handler(sandbox: Sandbox) -> None:
    """A child that is forked while its parent emulates watches for signals of its own."""
    after = np.full(64, 0xAB, np.uint8)

    def release() -> None:
        sandbox.programs.run("release", shapes(FULL), 0, after.ctypes.data, 0, after.ctypes.data)

    sandbox.emulator.start(sandbox.report)
    finding = sandbox.run(release)
    sandbox.emulator.stop()

    assert finding == Finding(outcome=Outcome.CORRECT)


def test_four_threads_have_tiles_of_their_own(programs: Programs) -> None:
    def count_wrong(number: int) -> int:
        generator = np.random.default_rng(number)
        rows, columns, depth = (int(size) for size in generator.integers(1, 17, 3))
        sums = generator.integers(-1000, 1000, (rows, columns), np.int32)
        x = generator.integers(0, 255, (rows, 4 * depth), np.uint8)
        w = generator.integers(-128, 127, (depth, 4 * columns), np.int8)
        config = shapes((rows, 4 * columns), (rows, 4 * depth), (depth, 4 * columns))
        tiles = [padded(one) for one in (sums, x, w, integer_product(sums, x, w))]
        return programs.count_wrong("tdpbusd_apart", 1000, config, *tiles)

    with ThreadPoolExecutor(max_workers=4) as pool:
        wrong = list(pool.map(count_wrong, range(4)))

    assert wrong == [0, 0, 0, 0]


@only_emulated
@pytest.mark.parametrize(("name", "config", "reason"), REFUSALS)
def test_what_amx_refuses_is_refused_with_a_reason(
    sandbox: Sandbox, name: str, config: NDArray[np.uint8], reason: str
) -> None:
    finding = sandbox.run(lambda: sandbox.programs.run(name, config))

    assert finding.outcome is Outcome.CRASHED
    assert reason in finding.detail


@only_emulated
def test_a_refusal_names_the_instruction_and_the_shapes(sandbox: Sandbox) -> None:
    config = shapes((4, 8), (4, 8), (3, 8))

    finding = sandbox.run(lambda: sandbox.programs.run("multiply", config))

    assert finding.detail == (
        "tdpbssd was refused: the first factor has rows of another length than the second has "
        "rows; tile 0 of 4 rows of 8 bytes, tile 1 of 4 rows of 8 bytes, tile 2 of 3 rows of 8 "
        "bytes"
    )


def test_other_illegal_instructions_end_the_process(sandbox: Sandbox) -> None:
    finding = sandbox.run(lambda: sandbox.programs.run("not_of_amx", shapes(FULL)))

    assert finding == Finding(outcome=Outcome.CRASHED, detail="ended by SIGILL")


@pytest.mark.parametrize("flush", Flush)
@pytest.mark.parametrize("too_many", [0, 4])
def test_a_tile_touches_its_rows_and_nothing_else(
    sandbox: Sandbox, flush: Flush, too_many: int
) -> None:
    """Rows of 12 bytes lie 20 bytes apart; four more meet a guard page at either end."""
    source = GuardedMatrix("source", (5, 12), np.dtype(np.uint8), padding=8, flush=flush)
    target = GuardedMatrix("target", (5, 12), np.dtype(np.uint8), padding=8, flush=flush)
    source.set_input(np.ones((5, 12), np.uint8))
    unused = np.zeros(64, np.uint8).ctypes.data
    config = shapes(*[(0, 0)] * 7, (5, 12 + too_many))
    begin = source.address - too_many * (flush is Flush.START)

    def copy() -> None:
        sandbox.programs.run("copy", config, begin, target.address, unused, unused, stride_bytes=20)
        assert target.find_stray_write() is None
        assert (target.values == 1).all()

    finding = sandbox.run(copy, source, target)

    if too_many:
        assert finding.outcome is Outcome.OUT_OF_BOUNDS
        assert finding.detail.startswith("touched the guard page")
        assert "source" in finding.detail
    else:
        assert finding == Finding(outcome=Outcome.CORRECT)


def test_a_store_to_an_input_is_found(sandbox: Sandbox) -> None:
    matrix = GuardedMatrix("x", (16, 64), np.dtype(np.uint8), padding=0, flush=Flush.START)
    matrix.set_input(np.ones((16, 64), np.uint8))

    finding = sandbox.run(
        lambda: sandbox.programs.run("store", shapes(FULL), matrix.address), matrix
    )

    assert finding.outcome is Outcome.OUT_OF_BOUNDS
    assert "x, which is an input" in finding.detail
