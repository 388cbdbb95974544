"""Activations and channels as bytes, held to float64, in C and in NumPy, and what is refused."""

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner import QuantisedActivations, quantise_activations, quantise_channels
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.guard import Flush, GuardedMatrix
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, InvalidProblem, InvalidSetting, ToolchainMissing
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.resources import call_native_dir, library_native_dir
from gemm_tuner.runtime import activations
from gemm_tuner.runtime.direct import NATIVE

Array = NDArray[Any]
Bytes = Literal["u8", "s8"]
Per = Literal["row", "tensor"]

FLOATS = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
# The greatest number of a type, the least normal one and the least of all.
LIMITS = {
    "float32": (float(np.finfo(np.float32).max), 2.0**-126, 2.0**-149),
    "bfloat16": (2.0**128 - 2.0**120, 2.0**-126, 2.0**-133),
    "float16": (65504.0, 2.0**-14, 2.0**-24),
}
SHAPES = [(0, 5), (5, 0), (1, 1), (3, 7), (2, 33), (17, 1), (4, 129), (5, 1003)]
WAYS: list[tuple[Bytes, Per]] = [("u8", "row"), ("s8", "row"), ("u8", "tensor"), ("s8", "tensor")]
# What rounding the scale, its reciprocal and the product adds to the half of a scale.
ROUNDINGS = 5e-5
LEAST = 2.0**-126

needs_native = pytest.mark.skipif(
    NATIVE is None, reason="gemm_tuner.runtime._native is not built; run hatch_build.py"
)


@pytest.fixture(params=[pytest.param("c", marks=needs_native), "numpy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let C quantise, and then NumPy, as where nothing was built."""
    if request.param == "numpy":
        monkeypatch.setattr(activations, "NATIVE", None)
    return str(request.param)


def numbers(shape: tuple[int, int], dtype: np.dtype[Any] = FLOATS[0], seed: int = 5) -> Array:
    """Return rows of many sizes and offsets, some of one sign, with gaps between them."""
    random = np.random.default_rng(seed)
    rows, columns = shape
    x = random.standard_normal((rows, columns + 3)) + random.choice([-9, 0, 0.5, 9], (rows, 1))
    made: Array = (x * 10.0 ** random.integers(-3, 4, (rows, 1))).astype(dtype)
    return made[:, :columns]


def stands_for(made: QuantisedActivations) -> NDArray[np.float64]:
    """Return the numbers that bytes stand for."""
    zero = 0.0 if made.zero_point is None else made.zero_point.astype(np.float64).reshape(-1, 1)
    scale = made.scale.astype(np.float64).reshape(-1, 1)
    return np.asarray(scale * (made.x.astype(np.float64) - zero))


def hold_to_float64(x: Array, made: QuantisedActivations) -> None:
    """Check the scale, the zero point, the rounding and the error of each number."""
    exact = x.astype(np.float64)
    axis = 1 if made.per == "row" else None
    greatest = exact.max(axis=axis, initial=0.0, keepdims=True)
    least = exact.min(axis=axis, initial=0.0, keepdims=True)
    scale = made.scale.astype(np.float64).reshape(greatest.shape)
    if made.zero_point is None:
        wanted, zero = np.maximum(greatest, -least) / 127, np.zeros_like(scale)
        assert made.x.size == 0 or made.x.min() >= -127
    else:
        wanted = (greatest - least) / 255
        zero = made.zero_point.astype(np.float64).reshape(greatest.shape)
        assert np.all((zero >= 0) & (zero <= 255))
        assert np.all(np.abs(zero + least / scale) <= 0.5 + ROUNDINGS)
    np.testing.assert_allclose(scale, np.maximum(wanted, LEAST), rtol=3e-7)
    off = np.abs(exact / scale + zero - made.x)
    assert np.all(off <= np.where(made.x == 255, 1.0, 0.5) + ROUNDINGS)
    assert np.all(np.abs(stands_for(made) - exact)[exact == 0] == 0)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("element", "per"), WAYS)
def test_each_number_is_as_near_as_promised(dtype: np.dtype[Any], element: Bytes, per: Per) -> None:
    for shape in SHAPES:
        x = numbers(shape, dtype)
        made = quantise_activations(x, element, per=per)

        assert made.x.shape == shape
        assert made.x.dtype == NUMPY_TYPES[DType(element)]
        assert made.scale.shape == (shape[0] if per == "row" else 1,)
        hold_to_float64(x, made)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("element", "per"), WAYS)
def test_c_and_numpy_give_the_same_bits(
    dtype: np.dtype[Any], element: Bytes, per: Per, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype) if dtype.itemsize == 2 else None
    given = [numbers((7, 515), dtype), *extremes(dtype)]
    given += [] if every is None else [every.reshape(64, 1024), every.reshape(-1, 1)]

    for x in given:
        by_c = quantise_activations(x, element, per=per)
        with monkeypatch.context() as without:
            without.setattr(activations, "NATIVE", None)
            by_numpy = quantise_activations(x, element, per=per)

        np.testing.assert_array_equal(by_c.x, by_numpy.x)
        np.testing.assert_array_equal(by_c.scale, by_numpy.scale)
        if element == "u8":
            np.testing.assert_array_equal(by_c.zero_point, by_numpy.zero_point)


def extremes(dtype: np.dtype[Any]) -> list[Array]:
    """Return rows that are hard: tiny, huge, of one number, of zeros of both signs."""
    huge, normal, tiny = LIMITS[dtype.name]
    rows = [
        [huge, -huge, 1.0, 0.0],
        [huge, huge, huge, huge],
        [tiny, -tiny, 3 * tiny, 0.0],
        [normal, tiny, -normal, normal],
        [0.0, -0.0, 0.0, -0.0],
        [-0.0, -0.0, -0.0, -0.0],
        [5.0, 5.0, 5.0, 5.0],
        [-5.0, -5.0, -5.0, -5.0],
        [-0.0, 7.0, 7.0, 7.0],
        [huge, tiny, 0.0, -0.0],
    ]
    return [np.array([row], dtype) for row in rows]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("element", "per"), WAYS)
def test_extreme_rows_are_as_near_as_others(dtype: np.dtype[Any], element: Bytes, per: Per) -> None:
    for x in extremes(dtype):
        made = quantise_activations(x, element, per=per)
        assert np.all(np.isfinite(made.scale))
        hold_to_float64(x, made)


@pytest.mark.usefixtures("either")
def test_ties_go_to_even() -> None:
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5]], np.float32)

    made = quantise_activations(x, "s8")

    assert made.scale.tolist() == [1.0]
    assert made.x.tolist() == [[127, 0, 2, 2, 0, -2, -2, -126]]


@pytest.mark.usefixtures("either")
def test_the_greatest_is_cut_where_the_zero_point_was_rounded_up() -> None:
    x = np.array([[254.5, -0.5, 0.0]], np.float32)

    made = quantise_activations(x)

    assert made.scale.tolist() == [1.0]
    assert made.zero_point.tolist() == [0]
    assert made.x.tolist() == [[254, 0, 0]]
    upward = quantise_activations(np.array([[253.5, -1.5, 0.0]], np.float32))
    assert upward.zero_point.tolist() == [2]
    assert upward.x.tolist() == [[255, 0, 2]]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("element", ["u8", "s8"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_becomes_nan_and_no_other(
    dtype: np.dtype[Any], element: Bytes, bad: float
) -> None:
    for column in (0, 17, 36):
        x = numbers((3, 37), dtype)
        x[1, column] = bad
        made = quantise_activations(x, element)

        assert np.isnan(made.scale).tolist() == [False, True, False]
        assert not np.any(made.x[1])
        assert made.zero_point is None or made.zero_point[1] == 0
        for row in (0, 2):
            one = quantise_activations(x[row : row + 1], element)
            np.testing.assert_array_equal(made.x[row], one.x[0])
        assert np.isnan(quantise_activations(x, element, per="tensor").scale).all()


@needs_native
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flush", list(Flush))
def test_nothing_is_touched_beside_the_arrays(dtype: np.dtype[Any], flush: Flush) -> None:
    for shape in ((1, 1), (3, 31), (2, 64), (4, 77)):
        for element, per in WAYS:
            count = shape[0] if per == "row" else 1
            x = GuardedMatrix("x", shape, dtype, padding=2, flush=flush)
            x.set_input(numbers(shape, dtype))
            written = [
                GuardedMatrix("y", shape, NUMPY_TYPES[DType(element)], padding=5, flush=flush),
                GuardedMatrix("scale", (1, count), FLOATS[0], padding=0, flush=flush),
                GuardedMatrix("zero", (1, count), np.dtype(np.int32), padding=0, flush=flush),
            ]
            y, scale, zero = (one.values for one in written)
            out = QuantisedActivations(y, scale[0], zero[0] if element == "u8" else None, per)

            assert quantise_activations(x.values, element, per=per, out=out) is out
            hold_to_float64(x.values, out)
            assert not any(one.find_stray_write() for one in written)


@pytest.mark.proof
@pytest.mark.parametrize("flags", [[], ["-mavx2", "-mfma"], ["-O1"]], ids=["sse2", "fma", "O1"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_level_and_compiler_gives_the_same_bits(
    compiler: str, flags: list[str], tmp_path: Path
) -> None:
    """A compiler that fuses a product and a sum, or drops a rounding, would give others."""
    try:
        toolchain = find_toolchain(compiler)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    library = built(toolchain.command, flags, tmp_path)
    for number, dtype in enumerate(FLOATS):
        # Halves of the steps of a scale of 1 and beside: one rounding more, and these differ.
        edges = np.arange(-255, 256) / 2.0
        near = np.nextafter(edges.astype(np.float32), np.float32(0))
        for x in (numbers((5, 301), dtype), np.stack([edges, near]).astype(dtype)):
            x = np.ascontiguousarray(x)  # noqa: PLW2901 - the same numbers
            for element, per in WAYS:
                wanted = quantise_activations(x, element, per=per)
                made = quantised_by(library, x, number, wanted)
                for ours, theirs in zip(made[:3], wanted[:3], strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def built(command: tuple[str, ...], flags: list[str], folder: Path) -> ctypes.CDLL:
    """Return the loops in C for one level of instructions."""
    target = folder / "quantise.so"
    native = call_native_dir()
    subprocess.run(
        [
            *(*command, "-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", "-DONE_LEVEL"),
            *(*flags, "-I", str(library_native_dir())),
            *(str(native / "quantise.c"), "-o", str(target)),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(target))
    library.quantise_rows.restype = None
    return library


class _Call(ctypes.Structure):
    """`quantise_call`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *(("x", ctypes.c_void_p), ("x_distance", ctypes.c_int64)),
        *(("y", ctypes.c_void_p), ("y_distance", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("scales", "zero_points")),
        *((name, ctypes.c_int32) for name in ("x_type", "is_one_scale")),
    )


def quantised_by(
    library: ctypes.CDLL, x: Array, number: int, like: QuantisedActivations
) -> QuantisedActivations:
    """Return what a library makes of rows without gaps, in arrays like those given."""
    y, scale = np.empty_like(like.x), np.empty_like(like.scale)
    zero = None if like.zero_point is None else np.empty_like(like.zero_point)
    rows, columns = x.shape
    call = _Call(
        *(rows, columns, x.ctypes.data, columns, y.ctypes.data, columns, scale.ctypes.data),
        *(None if zero is None else zero.ctypes.data, number, like.per == "tensor"),
    )
    library.quantise_rows(ctypes.byref(call))
    return QuantisedActivations(y, scale, zero, like.per)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(("element", "per"), WAYS)
def test_a_product_takes_what_is_returned_as_it_is(element: Bytes, per: Per) -> None:
    m, n, k = 5, 6, 33
    steps = {
        ("u8", "row"): "x_row_zero_point+row_scale",
        ("s8", "row"): "row_scale",
        ("u8", "tensor"): "x_zero_point+scale",
        ("s8", "tensor"): "scale",
    }[element, per]
    problem = Problem.create(
        m, n, k, dtype=f"{element}_s8_s32_f32", epilogue=f"{steps}+channel_scale+bias"
    )
    kernel = FallbackKernel(problem=problem, reason="a test")
    x, w, bias = numbers((m, k)), numbers((n, k), seed=6), numbers((1, n), seed=7)[0]
    channels = quantise_channels(w)

    made = quantise_activations(x, element, per=per)
    y = kernel(
        made.x,
        kernel.pack(channels.w),
        **made.operands,
        channel_scale=channels.channel_scale,
        bias=bias,
    )

    exact_w = channels.w.astype(np.float64) * channels.channel_scale[:, np.newaxis]
    expected = stands_for(made) @ exact_w.T + bias
    size = np.abs(stands_for(made)) @ np.abs(exact_w.T) + np.abs(bias)
    assert np.all(np.abs(y - expected) <= 1e-6 * size)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_channels_are_rounded_as_signed_rows_are(dtype: np.dtype[Any], layout: str) -> None:
    w = numbers((9, 41), dtype)
    given = w if layout == "nk" else w.T.copy()

    made = quantise_channels(given, w_layout=layout)

    assert made.w.shape == given.shape
    assert made.w.flags.c_contiguous
    rows = made.w if layout == "nk" else made.w.T
    hold_to_float64(w, QuantisedActivations(rows, made.channel_scale, None, "row"))


def test_channels_that_no_integer_stands_for_are_named() -> None:
    w = numbers((3, 4))
    w[2, 1] = np.nan
    with pytest.raises(InvalidArray, match="w holds NaN or infinity in channel 2"):
        quantise_channels(w)
    with pytest.raises(InvalidArray, match="w holds NaN or infinity in channel 2"):
        quantise_channels(w.T, w_layout="kn")
    with pytest.raises(InvalidProblem, match="'nk:g32' has no channels"):
        quantise_channels(w, w_layout="nk:g32")
    with pytest.raises(InvalidProblem, match="has no channels"):
        quantise_channels(w, w_layout=np.array(["nk", "kn"]))  # type: ignore[arg-type]  # no text
    with pytest.raises(InvalidArray, match="w has the dtype <f8"):
        quantise_channels(w.astype(np.float64))


def of_another_order() -> Array:
    return numbers((4, 6)).astype(">f4")


def masked() -> Array:
    return np.ma.masked_array(np.ones((4, 6), np.float32), mask=np.eye(4, 6, dtype=bool))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0]], "x is a list, but an array of two dimensions"),
        (None, "x is a NoneType"),
        (SimpleNamespace(shape=(4, 6), ndim=2), "x is a SimpleNamespace"),
        (SimpleNamespace(ndim=2), "x is a SimpleNamespace"),
        (np.float32(1), r"x is a float32|x has the shape \(\)"),
        (np.ones(6, np.float32), r"x has the shape \(6,\)"),
        (np.ones((1, 4, 6), np.float32), r"x has the shape \(1, 4, 6\)"),
        (np.ones((4, 6)), "x has the dtype <f8, .* pass x.astype"),
        (np.ones((4, 6), np.int8), "x has the dtype"),
        (np.ones((4, 6), np.complex64), "x has the dtype <c8"),
        (np.full((4, 6), None), "x has the dtype"),
        (of_another_order(), "x has the dtype >f4"),
        (numbers((4, 6))[::-1], "x has rows -"),
        (numbers((4, 6))[:, ::-1], "x has elements -4 bytes apart"),
        (numbers((4, 12))[:, ::2], "x has elements 8 bytes apart"),
        (np.broadcast_to(np.ones(6, np.float32), (4, 6)), "x has rows 0 bytes apart"),
        (np.frombuffer(bytes(97), np.uint8)[1:].view("f4").reshape(4, 6), "x does not start at"),
        (masked(), "x is a MaskedArray"),
    ],
)
def test_what_cannot_be_read_is_told(x: object, message: str) -> None:
    for out in (None, quantise_activations(numbers((4, 6)))):
        with pytest.raises(InvalidArray, match=message):
            quantise_activations(x, out=out)  # type: ignore[arg-type]  # it is no such array


@pytest.mark.parametrize("bad", ["s4", "U8", "", None, 8, ["u8"], np.array(["u8", "row"])])
def test_settings_that_are_not_known_are_told(bad: object) -> None:
    x = numbers((2, 3))
    with pytest.raises(InvalidSetting, match="use 'u8' or 's8'"):
        quantise_activations(x, bad)  # type: ignore[arg-type]  # it is no such word
    with pytest.raises(InvalidSetting, match="use 'row' or 'tensor'"):
        quantise_activations(x, per=bad)  # type: ignore[arg-type]


def read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.usefixtures("either")
def test_an_out_that_cannot_be_written_is_told_and_left_as_it_was() -> None:
    x = numbers((4, 6)).copy()
    good = quantise_activations(x)
    longer = np.zeros(8, np.float32)
    cases: list[tuple[Any, str]] = [
        (good.x, "out is a ndarray"),
        (tuple(good), "out is a tuple"),
        (quantise_activations(x, "s8"), "out has the dtype int8"),
        (quantise_activations(x, per="tensor"), "out is a .* for per = 'tensor'"),
        (quantise_activations(numbers((3, 6))), r"out has the shape \(3, 6\)"),
        (good._replace(x=good.x[:, ::-1]), "out has elements -1 bytes apart"),
        (good._replace(x=read_only(good.x)), "out is read-only"),
        (good._replace(x=None), "out is a NoneType"),
        (good._replace(scale=read_only(good.scale)), "out.scale is read-only"),
        (good._replace(scale=longer), r"out.scale has the shape \(8,\)"),
        (good._replace(scale=longer[::2]), "out.scale has elements 8 bytes apart"),
        (good._replace(scale=good.zero_point), "out.scale has the dtype int32"),
        (good._replace(zero_point=None), "out.zero_point is a NoneType: elements of u8"),
        (good._replace(zero_point=read_only(good.zero_point)), "out.zero_point is read-only"),
        (good._replace(zero_point=good.scale.view(np.int32)), "overlaps out.scale"),
        (good._replace(scale=x[0, :4]), "out overlaps x"),
        (good._replace(x=x.view(np.uint8)[:, :6]), "out overlaps x"),
    ]
    for out, message in cases:
        with pytest.raises(InvalidArray, match=message):
            quantise_activations(x, out=out)
    np.testing.assert_array_equal(x, numbers((4, 6)))  # not even where `out` lies in it
    with pytest.raises(InvalidArray, match="elements of s8 have none"):
        quantise_activations(x, "s8", out=good._replace(x=good.x.view(np.int8)))


@pytest.mark.usefixtures("either")
def test_rows_with_gaps_are_read_and_written_in_place() -> None:
    x = numbers((10, 40))[::3, 5:17]
    memory = np.full((4, 20), 0xA5, np.uint8)
    wanted = quantise_activations(x.copy())
    out = wanted._replace(x=memory[:, 3:15], scale=np.empty(4, np.float32))

    assert quantise_activations(x, out=out) is out
    np.testing.assert_array_equal(out.x, wanted.x)
    np.testing.assert_array_equal(out.scale, wanted.scale)
    assert np.all(memory[:, :3] == 0xA5)
    assert np.all(memory[:, 15:] == 0xA5)


@pytest.mark.usefixtures("either")
def test_read_only_and_mapped_arrays_are_read(tmp_path: Path) -> None:
    x = numbers((4, 6)).copy()
    wanted = quantise_activations(x)
    (tmp_path / "x").write_bytes(x.tobytes())
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=(4, 6))
    for one in (read_only(x), mapped, x.view(type("Named", (np.ndarray,), {}))):
        np.testing.assert_array_equal(quantise_activations(one).x, wanted.x)


@needs_native
def test_threads_quantise_at_once() -> None:
    x = [numbers((40, 600), seed=seed) for seed in range(8)]
    wanted = [quantise_activations(one).x for one in x]

    def repeat(place: int) -> bool:
        out = quantise_activations(x[place])
        return all(
            np.array_equal(quantise_activations(x[place], out=out).x, wanted[place])
            for _time in range(20)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeat, range(8)))
