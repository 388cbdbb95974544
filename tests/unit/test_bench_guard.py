import ctypes
import faulthandler
import os
import signal

import numpy as np
import pytest

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.guard import INTEGER_CANARY, Flush, GuardedMatrix, GuardedMemory
from gemm_tuner.domain.dtype import DType

FLOAT32 = np.dtype(np.float32)


def _signal_of_reading(address: int) -> int:
    """Return the signal that ends a child which reads a byte at `address`, 0 for none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the signal is expected
        ctypes.string_at(address, 1)
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (64, 64)])
def test_byte_after_the_end_is_guarded(shape: tuple[int, int]) -> None:
    matrix = GuardedMatrix("y", shape, FLOAT32, padding=2, flush=Flush.END)
    rows, columns = shape
    size_bytes = 4 * ((rows - 1) * (columns + 2) + columns)

    assert _signal_of_reading(matrix.address + size_bytes - 1) == 0
    assert _signal_of_reading(matrix.address + size_bytes) == signal.SIGSEGV


def test_byte_before_the_start_is_guarded() -> None:
    matrix = GuardedMatrix("y", (3, 5), FLOAT32, padding=0, flush=Flush.START)

    assert _signal_of_reading(matrix.address) == 0
    assert _signal_of_reading(matrix.address - 1) == signal.SIGSEGV


@pytest.mark.parametrize("dtype", [NUMPY_TYPES[one] for one in DType], ids=str)
def test_matrix_starts_as_what_no_result_is(dtype: np.dtype[np.generic]) -> None:
    matrix = GuardedMatrix("y", (3, 5), dtype, padding=1, flush=Flush.END)

    if dtype.kind in "iu":
        assert (np.frombuffer(matrix.values.tobytes(), np.uint8) == INTEGER_CANARY).all()
    else:
        assert np.isnan(matrix.values).all()


def test_writing_elements_leaves_the_padding_unchanged() -> None:
    matrix = GuardedMatrix("y", (3, 5), FLOAT32, padding=1, flush=Flush.END)

    matrix.values[...] = 1.0

    assert matrix.find_stray_write() is None


def test_writing_between_rows_is_seen() -> None:
    matrix = GuardedMatrix("y", (3, 5), FLOAT32, padding=1, flush=Flush.END)

    ctypes.c_float.from_address(matrix.address + 4 * 5).value = 1.0

    assert matrix.find_stray_write() == "wrote between the rows of y"


@pytest.mark.parametrize(
    ("flush", "offset_bytes", "side"), [(Flush.START, 4 * 15, "after"), (Flush.END, -1, "before")]
)
def test_writing_beside_the_matrix_is_seen_where_no_page_guards_it(
    flush: Flush, offset_bytes: int, side: str
) -> None:
    matrix = GuardedMatrix("y", (3, 5), FLOAT32, padding=0, flush=flush)

    ctypes.c_uint8.from_address(matrix.address + offset_bytes).value = 0

    assert matrix.find_stray_write() == f"wrote {side} y"


def test_writing_beside_a_block_is_seen() -> None:
    block = GuardedMemory("workspace", 100, flush=Flush.START, alignment_bytes=64)

    ctypes.c_uint8.from_address(block.address + 100).value = 0

    assert block.find_stray_write() == "wrote after workspace"


def test_input_has_its_values_and_regions() -> None:
    matrix = GuardedMatrix("x", (2, 3), FLOAT32, padding=4, flush=Flush.START)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)

    matrix.set_input(values)

    assert np.array_equal(matrix.values, values)
    assert [region.name for region in matrix.regions] == [
        "the guard page before x",
        "the guard page after x",
        "x, which is an input",
    ]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices_can_be_guarded(shape: tuple[int, int]) -> None:
    matrix = GuardedMatrix("y", shape, FLOAT32, padding=3, flush=Flush.END)

    assert matrix.values.size == 0
    assert matrix.find_stray_write() is None
