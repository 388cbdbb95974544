import mmap

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.arrays.views import check_overlap, view_matrix, view_operand, view_output
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.errors import InvalidArray
from gemm_tuner.machine.memory import HUGE_PAGE_BYTES, allocate_aligned

SHAPE = (4, 6)


def _matrix() -> NDArray[np.float32]:
    return np.zeros(SHAPE, np.float32)


def _misaligned() -> NDArray[np.float32]:
    raw = np.zeros(4 * 6 * 4 + 1, np.uint8)
    return raw[1:].view(np.float32).reshape(SHAPE)


@pytest.mark.parametrize(
    ("array", "leading_dimension"),
    [
        (_matrix(), 6),
        (np.zeros((4, 10), np.float32)[:, :6], 10),
        (np.zeros((8, 6), np.float32)[::2], 12),
        (np.zeros((4, 10), np.float32)[:, 3:9], 10),
    ],
)
def test_rows_at_any_distance_are_taken(array: NDArray[np.float32], leading_dimension: int) -> None:
    view = view_matrix("x", array, SHAPE, DType.F32)

    assert view.leading_dimension == leading_dimension
    assert view.address == array.ctypes.data


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ([[1.0]], "list"),
        (np.zeros(SHAPE), "float64"),
        (np.zeros((6, 4), np.float32), r"\(6, 4\)"),
        (np.zeros(24, np.float32), r"\(24,\)"),
        (np.zeros((6, 4), np.float32).T, "24 bytes|16 bytes|contiguous"),
        (np.zeros((4, 12), np.float32)[:, ::2], "8 bytes apart"),
        (_matrix()[:, ::-1], "-4 bytes apart"),
        (_matrix()[::-1], "-24 bytes apart"),
        (np.broadcast_to(np.zeros(6, np.float32), SHAPE), "0 bytes apart"),
        (_misaligned(), "multiple of 4 bytes"),
    ],
)
def test_unusable_arrays_are_refused_by_name(array: object, reason: str) -> None:
    with pytest.raises(InvalidArray, match=reason) as refusal:
        view_matrix("x", array, SHAPE, DType.F32)

    assert "x" in str(refusal.value)


@pytest.mark.parametrize("shape", [(0, 6), (4, 0), (0, 0), (1, 6), (4, 1)])
def test_empty_and_thin_matrices_are_taken(shape: tuple[int, int]) -> None:
    view = view_matrix("x", np.zeros(shape, np.float32), shape, DType.F32)

    assert view.leading_dimension >= max(1, shape[1])


def test_read_only_output_is_refused() -> None:
    out = _matrix()
    out.flags.writeable = False

    with pytest.raises(InvalidArray, match="read-only"):
        view_output(out, SHAPE, DType.F32)


def test_output_that_overlaps_an_input_is_refused() -> None:
    both = np.zeros((5, 6), np.float32)

    with pytest.raises(InvalidArray, match="out overlaps add"):
        check_overlap(both[1:], "add", both[:4])


def test_output_beside_an_input_in_the_same_rows_is_taken() -> None:
    both = np.zeros((4, 12), np.float32)

    check_overlap(both[:, :6], "x", both[:, 6:])


@pytest.mark.parametrize("value", [2, 2.0, np.float64(2.0), np.array(2.0, np.float32)])
def test_scalar_operand_is_a_number_or_one_element(value: object) -> None:
    _view, array = view_operand("scale", value, OperandShape.SCALAR, SHAPE, DType.F32)

    assert array.dtype == np.float32
    assert array.tolist() == [2.0]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (OperandShape.SCALAR, "two"),
        (OperandShape.SCALAR, np.zeros(2, np.float32)),
        (OperandShape.ROW_VECTOR, np.zeros(5, np.float32)),
        (OperandShape.ROW_VECTOR, np.zeros(12, np.float32)[::2]),
        (OperandShape.ROW_VECTOR, np.zeros(6)),
        (OperandShape.COLUMN_VECTOR, np.zeros(6, np.float32)),
        (OperandShape.MATRIX, np.zeros(6, np.float32)),
    ],
)
def test_unusable_operands_are_refused(kind: OperandShape, value: object) -> None:
    with pytest.raises(InvalidArray):
        view_operand("operand", value, kind, SHAPE, DType.F32)


def test_large_memory_is_there_when_the_system_refuses_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No advice has this number: it is refused, as huge pages are where the system has none.
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)

    memory = allocate_aligned(HUGE_PAGE_BYTES)

    assert memory.size == HUGE_PAGE_BYTES
    assert not memory.any()
