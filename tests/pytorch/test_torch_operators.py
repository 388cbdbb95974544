"""The operators in C++ that models of PyTorch call; skipped where PyTorch is not installed."""

import re
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.domain.problem import Problem

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_kernels import kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import K, N, check, sample_x  # noqa: E402

from gemm_tuner.torch.operators import add_layer  # noqa: E402


def test_operators_hold_what_pytorch_asks_of_them() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)])
    ops, w, bias = torch.ops.gemm_tuner, sample_x(N, K), sample_x(N)
    packed = ops.pack(w, layer.packed_bytes, layer.number)

    torch.library.opcheck(ops.pack.default, (w, layer.packed_bytes, layer.number))
    torch.library.opcheck(ops.linear.default, (sample_x(), packed, bias, layer.number))
    check(
        ops.linear(sample_x(6, K) * 0 + 1, packed, bias, layer.number),
        (torch.ones(6, K) @ w.T + bias),
    )


def test_weights_are_packed_the_same_each_time() -> None:
    problems = [f"f32_s8 {rows}x{N}x{K} nk:gk" for rows in (1, 6)]
    layer = add_layer([kernel_of(Problem.parse(one), 1) for one in problems])
    w, scales = torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.rand(N, 1)
    if not any(one.kernel.native.packed_weight_bytes % 64 for one in layer.kernels):
        pytest.skip("the kernels of this CPU pack whole lines, behind which nothing is left over")
    found = []
    for byte in (7, 99):
        rooms = [torch.full((layer.packed_bytes,), byte, dtype=torch.uint8) for _ in range(9)]
        del rooms  # what is packed lies in such memory next
        arguments = w, layer.packed_bytes, layer.number, scales
        found.append(torch.ops.gemm_tuner.pack(*arguments))
    assert torch.equal(*found)
    torch.library.opcheck(torch.ops.gemm_tuner.pack.default, arguments)


def test_packed_weights_may_lie_anywhere() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk"), 1)])
    ops, x = torch.ops.gemm_tuner, sample_x()
    for start in (1, 16, 1):  # what is freed may come back at the same address
        w = sample_x(N, K)
        room = torch.empty(layer.packed_bytes + 64, dtype=torch.uint8)
        packed = room[start : start + layer.packed_bytes]
        packed.copy_(ops.pack(w, layer.packed_bytes, layer.number))
        for _ in range(2):
            check(ops.linear(x, packed, None, layer.number), x @ w.T)
        del room, packed


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_of_pytorch_pack_the_bytes_of_one(threads: int) -> None:
    n, k = 400, 50
    layer = add_layer([kernel_of(Problem.parse(f"f32 {m}x{n}x{k} nk"), 1) for m in (1, 40)])
    w, before = sample_x(n, k), torch.get_num_threads()
    packed = []
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            packed.append(torch.ops.gemm_tuner.pack(w, layer.packed_bytes, layer.number))
        finally:
            torch.set_num_threads(before)

    for placed in layer.kernels:
        end = placed.packed_offset + placed.kernel.native.packed_weight_bytes
        one, shared = (memory[placed.packed_offset : end] for memory in packed)
        assert torch.equal(one, shared)


def _calls_with_one_on_meta() -> list[Any]:
    """Return calls of each operator, of which one array has no memory."""
    linear = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)]).number
    product = add_layer([kernel_of(Problem.parse(f"matmul f32 6x{N}x{K} nk"), 1)]).number
    heads = add_layer([kernel_of(Problem.parse(f"attention f32 6x{N}x{K} scale"), 1)]).number
    ops, x, w = torch.ops.gemm_tuner, sample_x(), sample_x(N, K)
    q, k, away = sample_x(1, 1, 6, K), sample_x(1, 1, N, K), "meta"
    packed = torch.empty(64, dtype=torch.uint8, device=away)
    return [
        lambda: ops.linear(x, packed, sample_x(N), linear),
        lambda: ops.pack(w.to(away), 64, linear, sample_x(N)),
        lambda: ops.matmul(x, w.to(away), product),
        lambda: ops.attention(q, k, k.to(away), heads),
        lambda: ops.fused_linear(x, packed, [sample_x(N), None], [0.0, 0.0], linear),
    ]


def test_arrays_with_and_without_memory_are_refused_together() -> None:
    for call in _calls_with_one_on_meta():
        with pytest.raises(RuntimeError, match="an array is on cpu, and another on meta"):
            call()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(6, K, requires_grad=True)}, "no derivative"),
        ({"w": torch.zeros(N, K, requires_grad=True)}, "no derivative"),
        ({"operands": [torch.zeros(N), torch.zeros(N, requires_grad=True)]}, "no derivative"),
        ({"operands": [torch.zeros(N)], "numbers": [0.0]}, "reads 2 operands"),
        ({"operands": [torch.zeros(N), None]}, "channel_scale must be"),
        ({"operands": [torch.zeros(N), torch.zeros(N + 1)]}, "channel_scale must be"),
        ({"operands": [torch.zeros(N), torch.zeros(N).double()]}, "channel_scale"),
        ({"x": torch.zeros(6, K + 1)}, "last dimension"),
    ],
)
def test_a_chain_that_cannot_be_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias+channel_scale"), 1)])
    x, w, bias = sample_x(), sample_x(N, K), sample_x(N)
    arguments = {
        "x": x,
        "packed": torch.ops.gemm_tuner.pack(w, layer.packed_bytes, layer.number),
        "operands": [bias, torch.full((N,), 2.0)],
        "numbers": [0.0, 0.0],
        "layer": layer.number,
    }

    y = torch.ops.gemm_tuner.fused_linear(**arguments)

    torch.testing.assert_close(y, 2.0 * torch.nn.functional.linear(x, w, bias))
    with pytest.raises(RuntimeError, match="fused_linear computes it"):
        torch.ops.gemm_tuner.linear(x, arguments["packed"], bias, layer.number)
    with pytest.raises(RuntimeError, match=reason):
        torch.ops.gemm_tuner.fused_linear(**arguments | changes)


def test_a_chain_reads_what_stands_for_an_array() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias+add+channel_scale"), 1)])
    x, w, bias, other, scale = sample_x(), sample_x(N, K), sample_x(N), sample_x(6, N), sample_x(N)
    packed = torch.ops.gemm_tuner.pack(w, layer.packed_bytes, layer.number)

    def y(*operands: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.ops.gemm_tuner.fused_linear(x, packed, operands, [0.0] * 3, layer.number)

    negated = [torch._neg_view(one) for one in (bias, other, scale)]
    check(y(*negated), (x @ w.T - bias - other) * -scale)
    check(y(bias, torch._efficientzerotensor((6, N)), scale), (x @ w.T + bias) * scale)


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": torch.zeros(7, N)},
        {"bias": torch.zeros(N).double()},
        {"other": torch.zeros(N)},
        {"scale": torch.zeros(1)},
        {"scale": torch.zeros(7, 1, N)},
        {"scale": torch.zeros(N).double()},
        {"scale": None},
        {"w": torch.zeros(N + 1, K)},
        {"w": torch.zeros(K)},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_without_a_kernel_read_what_the_others_do(
    changes: dict[str, Any], device: str
) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias+add+channel_scale"), 1)])
    given = {
        "x": sample_x(7, K),
        "packed": torch.zeros(layer.packed_bytes, dtype=torch.uint8),
        "bias": sample_x(N),
        "other": sample_x(7, N),
        "scale": sample_x(N),
        "w": sample_x(N, K),
    }

    def y(**arrays: Any) -> Any:  # noqa: ANN401 - tensors
        x, packed, *operands, w = [
            one if one is None else one.to(device) for one in arrays.values()
        ]
        return torch.ops.gemm_tuner.fused_linear(x, packed, operands, [0.0] * 3, layer.number, w)

    assert y(**given).shape == (7, N)
    with pytest.raises(RuntimeError, match="must"):
        y(**given | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(6, K + 1)}, "last dimension"),
        ({"x": torch.zeros(6, K, dtype=torch.float64)}, "kernels of this layer read"),
        ({"x": torch.zeros(())}, "last dimension"),
        ({"x": torch.zeros(7, K)}, "no kernel of this layer is for 7 rows"),
        ({"packed": torch.zeros(3, dtype=torch.uint8)}, "gemm_tuner::pack"),
        ({"bias": None}, "bias must be"),
        ({"bias": torch.zeros(N + 1)}, "bias must be"),
        ({"layer": 5}, "no kernels for layer 5"),
        ({"x": torch.zeros(6, K, requires_grad=True)}, "no derivative"),
    ],
)
@pytest.mark.parametrize("how", ["called", "traced"])
def test_operators_refuse_what_they_cannot_read(
    changes: dict[str, Any], reason: str, how: str
) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)])
    packed = torch.ops.gemm_tuner.pack(sample_x(N, K), layer.packed_bytes, layer.number)
    arguments = {
        "x": sample_x(),
        "packed": packed,
        "bias": sample_x(N),
        "layer": layer.number,
        **changes,
    }
    if how == "traced":
        arguments = _without_memory(arguments)

    with pytest.raises(RuntimeError, match=reason):
        torch.ops.gemm_tuner.linear(**arguments)


def _without_memory(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as a compiler gives them, by shapes and types."""
    return {
        name: given.to("meta") if isinstance(given, torch.Tensor) else given
        for name, given in arguments.items()
    }


@pytest.mark.parametrize("how", ["called", "traced"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(6, K + 1)}, "x has the shape .*last dimension must be"),
        ({"x": torch.zeros(K)}, "at least two dimensions"),
        ({"x": torch.zeros(6, K, dtype=torch.float64)}, "kernels of this product read"),
        ({"w": torch.zeros(N + 1, K)}, "w has the shape .*last two dimensions must be"),
        ({"x": torch.zeros(2, 6, K), "w": torch.zeros(3, N, K)}, "must match the size"),
        ({"bias": None}, "bias must be given"),
        ({"bias": torch.zeros(N + 1)}, "bias must be"),
        ({"other": torch.zeros(5, N)}, "other has the shape .*broadcast to that of y"),
    ],
)
def test_products_refuse_what_they_cannot_read(
    changes: dict[str, Any], reason: str, how: str
) -> None:
    problem = Problem.parse(f"matmul f32 1..9x{N}x{K} nk bias+add")
    arguments = {
        "x": sample_x(),
        "w": sample_x(N, K),
        "layer": add_layer([kernel_of(problem, 1)]).number,
        "bias": sample_x(N),
        "other": sample_x(6, N),
        **changes,
    }
    if how == "traced":
        arguments = _without_memory(arguments)

    with pytest.raises(RuntimeError, match=reason):
        torch.ops.gemm_tuner.matmul(**arguments)


def test_wrong_shapes_are_refused_when_a_model_is_traced() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)])
    packed = torch.ops.gemm_tuner.pack(sample_x(N, K), layer.packed_bytes, layer.number)
    bias = torch.zeros(N + 1)

    def call(x: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.ops.gemm_tuner.linear(x, packed, bias, layer.number)

    compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=f"bias must be {N} elements") as caught:
        compiled(sample_x())
    assert "Dynamo" in str(caught.value) or "fake" in str(caught.value).lower()


def test_one_layer_has_one_order_of_its_weights() -> None:
    kernels = [kernel_of(Problem.parse(f"f32 {m}x{N}x{K} nk"), 1) for m in (1, 6, 40)]

    first, second = add_layer(kernels), add_layer(kernels[::-1])

    assert first == second


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="the kernel has no transparent huge pages")
def test_packed_weights_ask_for_large_pages() -> None:
    n = k = 1600
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{n}x{k} nk"), 1)])
    packed = torch.ops.gemm_tuner.pack(sample_x(n, k), layer.packed_bytes, layer.number)
    middle = packed.data_ptr() + layer.packed_bytes // 2

    flags = ""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= middle < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            flags = line

    assert "hg" in flags.split()
