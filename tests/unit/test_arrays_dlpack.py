"""Arrays of other libraries, by DLPack; PyTorch's own are in tests/kernels/test_torch.py."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner import quantise_weights
from gemm_tuner.arrays.dlpack import as_array, new_result
from gemm_tuner.arrays.views import view_matrix
from gemm_tuner.domain.dtype import DType
from gemm_tuner.errors import InvalidArray


class _Foreign:
    """An array of a library that knows no NumPy."""

    def __init__(self, array: NDArray[Any], *, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        return self._array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class _Old(_Foreign):
    """An array of a library from before DLPack 1.0."""

    def __dlpack__(self) -> object:  # type: ignore[override]  # as it was
        return self._array.__dlpack__()


class _Private(_Foreign):
    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        raise BufferError(f"not for you, {max_version}")


class _Traced(_Foreign):
    """A number of a program that JAX traces."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise AttributeError("a tracer lies nowhere")


class _Nothing(_Foreign):
    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        return max_version


class _OfTorch(_Foreign):
    """What PyTorch would give: errors about it are told in its words."""

    __module__ = "torch"


class _OfJax(_Foreign):
    """What JAX gives: a capsule that does not say that nothing may write."""

    __module__ = "jaxlib._jax"


def _shared(foreign: _Foreign) -> NDArray[Any]:
    array = as_array("x", foreign)
    assert isinstance(array, np.ndarray)
    return array


@pytest.mark.parametrize("kind", [_Foreign, _Old])
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "u1", "i4", "c8", "?"])
def test_memory_is_shared(kind: type[_Foreign], dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(dtype)

    shared = _shared(kind(array))

    assert shared.dtype == array.dtype
    assert shared.ctypes.data == array.ctypes.data
    assert np.array_equal(shared, array)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 10), np.float32)[:, 2:8],
        np.zeros((4, 6), np.float32).T,
        np.zeros((8, 6), np.float32)[::-2],
        np.zeros((0, 6), np.float32),
        np.zeros((), np.float32),
    ],
)
def test_shape_and_strides_are_kept(array: NDArray[np.float32]) -> None:
    shared = _shared(_Foreign(array))

    assert shared.shape == array.shape
    assert shared.size == 0 or shared.strides == array.strides


def test_memory_is_kept_as_long_as_it_is_shared_and_no_longer() -> None:
    array = np.ones((4, 6), np.float32)
    reference = weakref.ref(array)
    shared = _shared(_Foreign(array))

    del array
    gc.collect()
    assert reference() is not None
    assert shared.all()

    del shared
    gc.collect()
    assert reference() is None


def test_read_only_memory_stays_read_only() -> None:
    array = np.ones((4, 6), np.float32)
    array.flags.writeable = False

    assert not _shared(_Foreign(array)).flags.writeable


def test_arrays_of_jax_are_read_only_whatever_they_say() -> None:
    assert not _shared(_OfJax(np.ones((4, 6), np.float32))).flags.writeable


@pytest.mark.parametrize("value", [1.0, "text", None, [1.0], np.ones(3), np.float32(1)])
def test_other_values_are_left_as_they_are(value: object) -> None:
    assert as_array("x", value) is value


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        (_Traced(np.ones(3)), "does not share: a tracer lies nowhere"),
        (_Foreign(np.ones(3), device=(2, 1)), "x lies on the device cuda 1"),
        (_Foreign(np.ones(3), device=(99, 0)), "DLPack type 99"),
        (_Private(np.ones(3)), "does not share: not for you"),
        (_Nothing(np.ones(3)), "x gives no DLPack tensor"),
    ],
)
def test_what_cannot_be_shared_is_told(foreign: _Foreign, reason: str) -> None:
    with pytest.raises(InvalidArray, match=reason):
        as_array("x", foreign)


@pytest.mark.parametrize(
    ("array", "dtype", "of_torch", "of_others"),
    [
        (np.zeros((4, 6)), DType.F32, "x.to(torch.float32)", "x.astype(numpy.float32)"),
        (np.zeros((4, 6)), DType.BF16, "x.to(torch.bfloat16)", "x.astype(ml_dtypes.bfloat16)"),
        (np.zeros((6, 4), "f").T, DType.F32, "x.contiguous()", "numpy.ascontiguousarray(x)"),
        (np.zeros((8, 6), "f")[::-2], DType.F32, "x.contiguous()", "numpy.ascontiguousarray(x)"),
    ],
)
def test_advice_is_in_the_words_of_the_library_of_the_array(
    array: NDArray[Any], dtype: DType, of_torch: str, of_others: str
) -> None:
    for given, advice in (
        (_shared(_OfTorch(array)), of_torch),
        (_shared(_OfTorch(array[np.newaxis]))[0], of_torch),
        (_shared(_Foreign(array)), of_others),
        (array, of_others),
    ):
        with pytest.raises(InvalidArray) as refusal:
            view_matrix("x", given, (4, 6), dtype)

        assert f"pass {advice}." in str(refusal.value)


def test_results_of_a_library_that_makes_none_are_of_numpy() -> None:
    result: object = new_result(_Foreign(np.ones(3)), (2, 3), np.dtype(np.float32))

    assert isinstance(result, np.ndarray)
    assert result.shape == (2, 3)


def test_weights_of_another_library_are_quantised() -> None:
    w = np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)

    quantised = quantise_weights(_Foreign(w), "u4", group=32)

    wanted = quantise_weights(w, "u4", group=32)
    assert np.array_equal(quantised.w, wanted.w)
    assert np.array_equal(quantised.scales, wanted.scales)


def test_masked_arrays_are_refused() -> None:
    masked = np.ma.masked_equal(np.zeros((2, 2), np.float32), 0)

    with pytest.raises(InvalidArray, match=r"x is a MaskedArray.*pass x\.filled\(0\)"):
        as_array("x", masked)
    with pytest.raises(InvalidArray, match="w is a MaskedArray"):
        quantise_weights(masked, "s8", group="k")
