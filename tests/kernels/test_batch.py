"""Products of the same sizes in one call: kernels, and oneDNN or NumPy in their place."""

from typing import Any

import numpy as np
import pytest
from grids import grid_toolchain
from libraries import take_libraries_away
from numpy.typing import NDArray

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named

BATCH = 5
AnyKernel = Kernel | FallbackKernel


def make_kernel(problem: Problem, threads: int) -> Kernel:
    cpu = detect_cpu()
    candidate = Space(problem=problem, cpu=cpu, threads=threads).defaults()[0]
    family = family_named(candidate.micro_kernel.family)
    build = compile_kernel(
        render(problem, candidate, family),
        isa=family.isa,
        toolchain=grid_toolchain(as_served=False),
    )
    return load_kernel(build.binary, artifact=build.artifact, cpu=cpu, threads=threads)


@pytest.fixture(
    params=[
        "kernel",
        "kernel in two threads",
        pytest.param("oneDNN", marks=pytest.mark.baseline("onednn")),
        "NumPy",
    ]
)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a function of a problem
    if request.param == "NumPy":
        take_libraries_away(monkeypatch)

    def make_one(text: str) -> AnyKernel:
        problem = Problem.parse(text)
        if "kernel" not in request.param:
            return FallbackKernel(problem=problem, reason="a test asked for it")
        return make_kernel(problem, 2 if "two" in request.param else 1)

    return make_one


def stacked(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.stack(arrays)


@pytest.mark.parametrize(
    "text",
    [
        "f32 7x33x19 nk bias+add+scale",
        "bf16 0..9x20x16 kn bias+relu",
        "u8_s8_s32_f32 6x17x21 nk x_row_zero_point+row_scale+channel_scale+bias",
    ],
)
def test_each_product_is_what_it_is_alone(text: str, make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make(text)
    products = [make_inputs(kernel.problem, InputKind.NORMAL, seed) for seed in range(BATCH)]
    scalars = {
        operand.name for operand in kernel.problem.epilogue.operands if operand.shape == "scalar"
    }
    operands: dict[str, Any] = {
        name: products[0].operands[name]
        if name in scalars
        else stacked([one.operands[name] for one in products])
        for name in products[0].operands
    }
    for one in products:
        one.operands.update({name: products[0].operands[name] for name in scalars})
    x = stacked([one.x for one in products])

    own = kernel.batch(x, kernel.pack_batch(stacked([one.w for one in products])), **operands)
    shared = kernel.batch(x, kernel.pack(products[2].w), **operands)

    for item, one in enumerate(products):
        assert find_error(compute_expected(kernel.problem, one), np.asarray(own)[item]) is None
    expected = compute_expected(kernel.problem, products[2])
    assert find_error(expected, np.asarray(shared)[2]) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_each_product_has_quantised_weights_of_its_own(threads: int) -> None:
    kernel = make_kernel(Problem.parse("f32_u4 6x17x70 nk:g32 bias"), threads)
    products = [make_inputs(kernel.problem, InputKind.NORMAL, seed) for seed in range(BATCH)]
    packed = kernel.pack_batch(
        stacked([one.w for one in products]),
        scales=np.stack([one.scales for one in products if one.scales is not None]),
        zero_points=np.stack([one.zero_points for one in products if one.zero_points is not None]),
    )

    y = kernel.batch(
        stacked([one.x for one in products]),
        packed,
        bias=stacked([one.operands["bias"] for one in products]),
    )

    for item, one in enumerate(products):
        assert find_error(compute_expected(kernel.problem, one), np.asarray(y)[item]) is None


def test_products_may_lie_between_each_other(make: Any) -> None:  # noqa: ANN401
    """As heads of attention do: (m, batch, k), seen as (batch, m, k)."""
    kernel: AnyKernel = make("f32 6x8x5 nk bias")
    random = np.random.default_rng(1)
    x = random.standard_normal((6, BATCH, 5), dtype=np.float32).transpose(1, 0, 2)
    w = random.standard_normal((BATCH, 8, 5), dtype=np.float32)
    bias = random.standard_normal(8, dtype=np.float32)
    memory = np.full((6, BATCH, 8), np.nan, np.float32)

    out = kernel.batch(x, kernel.pack_batch(w), out=memory.transpose(1, 0, 2), bias=bias)

    assert np.allclose(memory, np.einsum("bmk,bnk->mbn", x, w) + bias, atol=1e-5)
    assert np.shares_memory(np.asarray(out), memory)


def test_an_empty_batch_is_an_empty_result(make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make("f32 6x8x5 nk none")

    y = kernel.batch(np.zeros((0, 6, 5), np.float32), kernel.pack(np.zeros((8, 5), np.float32)))

    assert np.asarray(y).shape == (0, 6, 8)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [((0, 6, 4), (0, 6, 8), "x has the shape"), ((0, 6, 5), (3, 6, 8), "out has the shape")],
)
def test_a_wrong_array_of_an_empty_batch_is_named(
    x: tuple[int, ...],
    out: tuple[int, ...],
    message: str,
    make: Any,  # noqa: ANN401
) -> None:
    kernel: AnyKernel = make("f32 6x8x5 nk none")
    packed = kernel.pack(np.zeros((8, 5), np.float32))

    with pytest.raises(InvalidArray, match=message):
        kernel.batch(np.zeros(x, np.float32), packed, out=np.zeros(out, np.float32))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (6, 5)}, "a batch"),
        ({"w": (3, 8, 5)}, "3 products, but x has 5"),
        ({"out": (4, 6, 8)}, "is needed"),
        ({"out": (5, 6, 7)}, "is needed"),
        ({"bias": (4, 8)}, "5 products"),
        ({"x": (5, 7, 5)}, "m = 6|shape"),
    ],
)
def test_a_wrong_array_is_named(
    shapes: dict[str, tuple[int, ...]],
    message: str,
    make: Any,  # noqa: ANN401
) -> None:
    kernel: AnyKernel = make("f32 6x8x5 nk bias")
    wanted = {"x": (5, 6, 5), "w": (5, 8, 5), "out": (5, 6, 8), "bias": (8,), **shapes}
    arrays: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in wanted.items()}
    packed = kernel.pack_batch(arrays["w"])

    with pytest.raises(InvalidArray, match=message):
        kernel.batch(arrays["x"], packed, out=arrays["out"], bias=arrays["bias"])


def test_weights_of_a_batch_are_not_those_of_one_product(make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make("f32 6x8x5 nk none")
    packed: Any = kernel.pack_batch(np.ones((2, 8, 5), np.float32))

    with pytest.raises(InvalidArray, match=r"call kernel\.batch"):
        kernel(np.ones((6, 5), np.float32), packed)


@pytest.mark.parametrize("strides", [(0, 32, 4), (16, 64, 4)])
def test_products_of_out_must_not_overlap(strides: tuple[int, ...]) -> None:
    kernel = make_kernel(Problem.parse("f32 6x8x5 nk none"), 1)
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.float32), (5, 6, 8), strides)

    with pytest.raises(InvalidArray, match="overlap each other"):
        kernel.batch(
            np.ones((5, 6, 5), np.float32), kernel.pack(np.ones((8, 5), np.float32)), out=out
        )


def test_products_of_out_must_not_overlap_those_of_x(make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make("f32 1x4x4 nk none")
    both = np.ones((4, 1, 4), np.float32)

    with pytest.raises(InvalidArray, match="out overlaps x"):
        kernel.batch(both[:-1], kernel.pack(np.eye(4, dtype=np.float32)), out=both[1:])


def test_no_weights_are_packed_for_no_product(make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make("f32 6x8x5 nk none")

    packed = kernel.pack_batch(np.empty((0, 8, 5), np.float32))

    assert np.asarray(kernel.batch(np.empty((0, 6, 5), np.float32), packed)).shape == (0, 6, 8)


def test_weights_that_are_not_packed_are_named(make: Any) -> None:  # noqa: ANN401
    kernel: AnyKernel = make("f32 6x8x5 nk none")
    w: Any = np.ones((8, 5), np.float32)

    with pytest.raises(InvalidArray, match=r"packed is a ndarray.*kernel\.pack"):
        kernel(np.ones((6, 5), np.float32), w)
    with pytest.raises(InvalidArray, match=r"packed is a ndarray.*kernel\.pack"):
        kernel.batch(np.ones((2, 6, 5), np.float32), w)
