"""What a layer for NumPy says of arguments that it cannot use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from linear_parts import BIAS, Array, K, Kernels, W, rows_of

from gemm_tuner import linear
from gemm_tuner.errors import InvalidArray, InvalidInput, InvalidSetting, StoreFailed


@dataclass
class Frame:
    """What has a shape and is no array, such as a table of another library."""

    shape: tuple[int, int] | None = (4, K)
    ndim: int = 2


def odd(make: Callable[[Array], object]) -> object:
    return make(rows_of(4).copy())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (odd(list), "x is a list"),
        (None, "x is a NoneType"),
        (Frame(), "x is a Frame"),
        (Frame(shape=None), "x is a Frame"),
        (odd(lambda x: x[0]), "x has the shape"),
        (odd(lambda x: x[np.newaxis]), "x has the shape"),
        (odd(lambda x: x[:, :-1]), "x has the shape"),
        (odd(lambda x: x[::-1]), "x has rows -64 bytes apart"),
        (odd(np.asfortranarray), "x has elements 16 bytes apart"),
        (odd(lambda x: x.astype(">f4")), "x has the dtype >f4|x has the dtype"),
        (odd(lambda x: x.astype(np.float64)), "x has the dtype"),
        (odd(lambda x: x.astype(np.int8)), "x has the dtype"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_an_x_that_cannot_be_used_is_told_at_any_call(
    x: object, message: str, dtype: Literal["int8"] | None, kernels: Kernels
) -> None:
    layer = linear(W, BIAS, source=kernels, dtype=dtype)
    with pytest.raises(InvalidArray, match=message):
        layer(x)  # type: ignore[type-var]  # it is no such array
    assert not kernels.asked
    layer(rows_of(4))
    with pytest.raises(InvalidArray, match=message):
        layer(x)  # type: ignore[type-var]  # it is no such array


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_an_out_that_cannot_be_used_is_told(dtype: Literal["int8"] | None) -> None:
    layer = linear(W[:K], BIAS[:K], dtype=dtype)
    x = rows_of(4).copy()
    before = x.copy()
    for out, message in (
        (np.zeros((4, K + 1), np.float32), "out has the shape"),
        (np.zeros((4, K)), "out has the dtype"),
        (np.zeros((8, K), np.float32)[::-2], "out has rows -"),
        (np.broadcast_to(np.zeros(K, np.float32), (4, K)), "out"),
        ([[0.0] * K] * 4, "out is a list"),
        *([(x, "out overlaps x")] if dtype is None else []),
    ):
        with pytest.raises(InvalidArray, match=message):
            layer(x, out=out)  # type: ignore[arg-type]  # one is a list
    np.testing.assert_array_equal(x, before)
    if dtype == "int8":  # it was read before anything is written
        np.testing.assert_array_equal(layer(x, out=x), layer(before))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"w": W.astype(np.float64)}, InvalidArray, "w has the dtype"),
        ({"w": W.astype(np.int8)}, InvalidArray, "w has the dtype"),
        ({"w": W[0]}, InvalidArray, "w has the shape"),
        ({"w": [[1.0]]}, InvalidArray, "w is a list"),
        ({"bias": BIAS[:-1]}, InvalidArray, r"bias has the shape \(31,\)"),
        ({"bias": BIAS[:, np.newaxis]}, InvalidArray, "bias has the shape"),
        ({"bias": 0.5}, InvalidArray, "bias has the shape None"),
        ({"bias": BIAS.astype(int)}, InvalidArray, "bias has the dtype int64"),
        ({"activation": "swish"}, InvalidInput, "'swish' is not known"),
        ({"activation": "add"}, InvalidInput, "activation 'add' reads an array, add"),
        ({"activation": np.tanh}, InvalidInput, "activation is a ufunc; give its name"),
        ({"dtype": "s4"}, InvalidSetting, "dtype = 's4' is not known"),
        ({"tune": "now"}, InvalidSetting, "tune = 'now' is not known"),
        ({"budget_s": np.float32(-1)}, InvalidSetting, r"budget_s = np.float32\(-1.0\) cannot"),
        ({"budget_s": 10**400}, InvalidSetting, r"budget_s = 10{59}\.\.\. cannot be used"),
        ({"budget_s": 0}, InvalidSetting, "budget_s = 0 cannot be used"),
        ({"budget_s": "1"}, InvalidSetting, "budget_s = '1' cannot be used"),
        ({"budget_s": True}, InvalidSetting, "budget_s = True cannot be used"),
        ({"budget_s": float("nan")}, InvalidSetting, "budget_s = nan cannot be used"),
        ({"threads": 0}, InvalidSetting, "threads = 0 is out of range"),
        ({"rows": ["9..1"]}, InvalidInput, "9..1 is an empty range"),
        ({"rows": []}, InvalidSetting, "0 values of m"),
        ({"rows": range(1, 30)}, InvalidSetting, "29 values of m"),
        ({"rows": 8.5}, InvalidInput, "rows = 8.5 cannot be used"),
        ({"rows": [8.5]}, InvalidInput, "m = '8.5' is not understood"),
        ({"activation": "+".join(["relu"] * 17)}, InvalidInput, "17 steps is too long"),
        ({"bias": BIAS, "activation": "+".join(["relu"] * 16)}, InvalidInput, "17 steps"),
        ({"tune": np.array(["wait", "never"])}, InvalidSetting, "tune = array"),
        ({"dtype": np.array(["int8", "s4"])}, InvalidSetting, "dtype = array"),
        ({"w": Frame()}, InvalidArray, "w is a Frame"),
        ({"source": 5}, InvalidSetting, "source 5 is none that is known"),
        ({"source": "kernels.csv"}, InvalidSetting, "source 'kernels.csv' is none"),
        ({"source": "sqlite:////nowhere/x.sqlite3"}, StoreFailed, "nowhere"),
    ],
)
def test_what_makes_no_layer_is_told(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        linear(**{"w": W, **arguments})


def test_weights_that_no_integer_stands_for_are_told() -> None:
    w = W.copy()
    w[3, 1] = np.inf
    with pytest.raises(InvalidArray, match="NaN or infinity in channel 3"):
        linear(w, dtype="int8")


def test_sums_of_bytes_that_leave_32_bits_are_told() -> None:
    most = 66311
    w = np.ones((1, most), np.float32)
    y = linear(w, dtype="int8")(w)
    np.testing.assert_allclose(y, [[most]], rtol=1e-3)

    with pytest.raises(InvalidArray, match=f"w has k = {most + 1}, but 32 bits hold"):
        linear(np.ones((1, most + 1), np.float32), dtype="int8")
