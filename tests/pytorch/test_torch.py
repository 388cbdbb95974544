"""Kernels on tensors of PyTorch, without a copy; skipped where PyTorch is not installed."""

import sys
from typing import Any

import numpy as np
import pytest

from gemm_tuner.arrays.dlpack import as_array
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

pytestmark = pytest.mark.proof
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

M, N, K = 6, 20, 9
EPILOGUE = "scale+bias+add+relu"
TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def _kernel(types: str) -> Kernel:
    return _load(f"{types} {M}x{N}x{K} nk {EPILOGUE}", f"scalar_{types}_2x2 mc{M}_nc{N}_kc{K}")


def _load(problem_text: str, tile_and_blocks: str) -> Kernel:
    candidate = Candidate.parse(f"{tile_and_blocks} jc_ic_jr_ir")
    problem = Problem.parse(problem_text)
    family = family_named(candidate.micro_kernel.family)
    build = compile_kernel(
        render(problem, candidate, family), isa=family.isa, toolchain=find_toolchain()
    )
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def _random(*shape: int, dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        getattr(torch, dtype)
    )


def _expected(x: Any, w: Any, bias: Any, add: Any) -> Any:  # noqa: ANN401 - tensors
    return torch.relu(0.5 * (x.float() @ w.float().T) + bias.float() + add.float())


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("way", ["direct", "checked", "fallback"])
@pytest.mark.parametrize("with_out", [False, True])
def test_tensors_are_taken(
    types: str, way: str, *, with_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Kernel | FallbackKernel = _kernel(types)
    if way == "fallback":
        kernel = FallbackKernel(problem=kernel.problem, reason="a test asked for it")
    dtype = TYPES[types]
    x, w = _random(M, K, dtype=dtype), _random(N, K, dtype=dtype)
    bias, add = _random(N, dtype=dtype), _random(2 * M, N, dtype=dtype)[::2]
    out = torch.zeros(M, N, dtype=getattr(torch, dtype)) if with_out else None
    packed = kernel.pack(w)
    if way == "direct" and NATIVE is not None and with_out:
        monkeypatch.setattr(kernel, "compute", None)
    call: Any = kernel.compute if way == "checked" and isinstance(kernel, Kernel) else kernel

    y = call(x, packed, out=out, scale=0.5, bias=bias, add=add)

    assert isinstance(y, torch.Tensor)
    assert (y is out) == with_out
    assert y.dtype == getattr(torch, dtype)
    tolerance = 1e-5 if types == "f32" else 2e-2
    torch.testing.assert_close(
        y.float(), _expected(x, w, bias, add), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("x_type", ["uint8", "int8"])
@pytest.mark.parametrize("with_out", [False, True])
def test_tensors_of_bytes_are_taken(x_type: str, *, with_out: bool) -> None:
    types = f"{'u8' if x_type == 'uint8' else 's8'}_s8_s32_s32"
    kernel = _load(f"{types} {M}x{N}x{K} nk x_zero_point", f"scalar_int8_2x2 mc{M}_nc{N}_kc{K}")
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 128, (M, K), generator=generator, dtype=getattr(torch, x_type))
    w = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
    out = torch.zeros(M, N, dtype=torch.int32) if with_out else None

    y = kernel(x, kernel.pack(w), out=out, x_zero_point=7)

    assert (y is out) == with_out
    assert torch.equal(y, (x.int() - 7) @ w.int().T)


def test_memory_of_tensors_is_shared() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        tensor = torch.zeros(M, N, dtype=dtype)[:, 1:]

        array = as_array("x", tensor)

        assert isinstance(array, np.ndarray)
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(M, K, requires_grad=True)}, "gradient.*detach"),
        ({"x": torch.zeros(M, K, device="meta")}, "does not share.*meta"),
        ({"x": torch.zeros(M, K, dtype=torch.float64)}, r"x\.to\(torch\.float32\)"),
        ({"x": torch.zeros(K, M).T}, r"x\.contiguous\(\)"),
        ({"bias": torch.zeros(2 * N)[::2]}, r"bias\.contiguous\(\)"),
        ({"x": torch.zeros(M, K + 1)}, "x has the shape"),
        ({"x": torch.zeros(M, K, dtype=torch.cfloat).conj().imag}, "negatives.*resolve_neg"),
        ({"scale": torch.ones(1, dtype=torch.cfloat).conj().imag}, "negatives.*resolve_neg"),
        ({"x": torch.zeros(M, K).to_sparse()}, "does not share"),
        ({"bias": torch.zeros(N, dtype=torch.int32)}, r"dtype int32.*bias\.to\(torch\.float32\)"),
        ({"out": torch.zeros(M, N + 1)}, "out has the shape"),
    ],
)
def test_wrong_tensors_are_told(changes: dict[str, Any], reason: str) -> None:
    kernel = _kernel("f32")
    named = {"scale": 0.5, "bias": _random(N), "add": _random(M, N), **changes}
    x = named.pop("x", _random(M, K))

    with pytest.raises(InvalidArray, match=reason):
        kernel(x, kernel.pack(_random(N, K)), **named)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about its own tensors
def test_tensors_without_memory_are_told() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - it may be missing

    kernel = _kernel("f32")
    packed = kernel.pack(_random(N, K))
    with FakeTensorMode():
        x = torch.zeros(M, K)

    with pytest.raises(InvalidArray, match=r"no memory of its own|does not share"):
        kernel(x, packed, scale=0.5, bias=_random(N), add=_random(M, N))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by forward mode itself
@pytest.mark.parametrize("way", ["direct", "fallback"])
def test_a_tangent_of_forward_mode_is_refused_and_not_lost(way: str) -> None:
    kernel: Kernel | FallbackKernel = _load(f"f32 {M}x{N}x{K}", f"scalar_f32_2x2 mc{M}_nc{N}_kc{K}")
    if way == "fallback":
        kernel = FallbackKernel(problem=kernel.problem, reason="a test asked for it")
    x, w, y = _random(M, K), _random(N, K), torch.empty(M, N)
    packed = kernel.pack(w)
    kernel(x, packed, out=y)
    forward_mode = torch.autograd.forward_ad

    with forward_mode.dual_level():
        dual = forward_mode.make_dual(x, torch.ones_like(x))
        with pytest.raises(InvalidArray, match=r"x has a tangent .*unpack_dual\(x\)\.primal"):
            kernel(dual, packed, out=y)
        kernel(forward_mode.unpack_dual(dual).primal, packed, out=y)

    torch.testing.assert_close(y, x @ w.T)


def test_overlap_of_tensors_is_told() -> None:
    kernel = _kernel("f32")
    both = torch.zeros(M + 1, N)

    with pytest.raises(InvalidArray, match="out overlaps add"):
        kernel(
            _random(M, K),
            kernel.pack(_random(N, K)),
            out=both[1:],
            scale=0.5,
            bias=_random(N),
            add=both[:-1],
        )


def test_calls_leave_no_reference_to_a_tensor_behind() -> None:
    kernel = _kernel("f32")
    packed = kernel.pack(_random(N, K))
    x, bias, add, out = _random(M, K), _random(N), _random(M, N), torch.zeros(M, N)
    before = [sys.getrefcount(tensor) for tensor in (x, bias, add, out)]

    for _ in range(50):
        kernel(x, packed, out=out, scale=0.5, bias=bias, add=add)
        kernel.compute(x, packed, out=out, scale=0.5, bias=bias, add=add)

    assert [sys.getrefcount(tensor) for tensor in (x, bias, add, out)] == before
