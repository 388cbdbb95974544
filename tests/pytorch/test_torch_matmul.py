"""The operator for products of two activations; skipped where PyTorch is not installed."""

from typing import Any

import pytest

from gemm_tuner.domain.problem import Problem

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_kernels import kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import HEADS, K, N, check, heads_of, sample_x  # noqa: E402

from gemm_tuner.torch.operators import OperatorLayer, add_layer  # noqa: E402

BATCH, ROWS = 2, 6


def _layer(text: str = f"f32 1..9x{N}x{K} nk scale+add") -> OperatorLayer:
    return add_layer([kernel_of(Problem.parse(f"matmul {text}"), 1)])


STRIDES: dict[str, tuple[Any, Any, Any]] = {
    "one product": (lambda: sample_x(ROWS, K), lambda: sample_x(N, K), (ROWS, N)),
    "a batch": (lambda: sample_x(BATCH, ROWS, K), lambda: sample_x(BATCH, N, K), (N,)),
    "one w": (lambda: sample_x(BATCH, ROWS, K), lambda: sample_x(N, K), (1, 1)),
    "one x": (lambda: sample_x(ROWS, K), lambda: heads_of(N), (ROWS, 1)),
    "heads": (lambda: heads_of(ROWS), lambda: heads_of(N), (BATCH, 1, 1, N)),
    "all apart": (
        lambda: sample_x(7, HEADS + 1, ROWS + 2, K + 3)[::3, 1:, 2:, 3:],
        lambda: sample_x(HEADS, 3, N, K + 1)[:, ::2, :, 1:].transpose(0, 1)[:1],
        (HEADS, ROWS, N),
    ),
    "groups": (
        lambda: heads_of(ROWS, 2 * HEADS).unflatten(1, (HEADS, 2)),
        lambda: heads_of(N)[:, :, None].expand(BATCH, HEADS, 2, N, K),
        (BATCH, 1, 1, ROWS, N),
    ),
    "rows of columns": (
        lambda: sample_x(BATCH, K, ROWS).mT,
        lambda: sample_x(K, N).mT,
        (BATCH, ROWS, N),
    ),
    "one row": (lambda: sample_x(1, K).expand(ROWS, K), lambda: sample_x(N, K), (ROWS, N)),
    "columns apart added": (
        lambda: sample_x(ROWS, K),
        lambda: sample_x(N, K),
        lambda: sample_x(2 * N)[::2],
    ),
    "a number added": (lambda: sample_x(ROWS, K), lambda: sample_x(N, K), ()),
    "no row": (lambda: sample_x(BATCH, 0, K), lambda: sample_x(N, K), (N,)),
    "no product": (lambda: sample_x(0, ROWS, K), lambda: sample_x(N, K), (N,)),
    "more rows than kernels": (lambda: sample_x(BATCH, 10, K), lambda: sample_x(N, K), (N,)),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", STRIDES)
def test_operator_reads_arrays_of_any_strides(name: str, threads: int) -> None:
    make_x, make_w, shape = STRIDES[name]
    other = shape() if callable(shape) else torch.randn(shape)
    x, w, layer = make_x(), make_w(), _layer()
    torch.set_num_threads(threads)
    y = torch.ops.gemm_tuner.matmul(x, w, layer.number, None, other, 0.5)
    check(y, x @ w.mT * 0.5 + other)
    assert y.is_contiguous()


def test_operator_holds_what_pytorch_asks_of_it() -> None:
    x, w, other, number = heads_of(ROWS), heads_of(N), sample_x(ROWS, N), _layer().number
    operator = torch.ops.gemm_tuner.matmul
    torch.library.opcheck(operator.default, (x, w, number, None, other, 0.5))

    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        operator(x, w, number, None, other)
    assert counter.get_total_flops() == 2 * BATCH * HEADS * ROWS * N * K


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_operator_is_mapped_over_products() -> None:
    x, w, other, number = heads_of(ROWS), heads_of(N), sample_x(ROWS, N), _layer().number

    def compute(x: Any, w: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.ops.gemm_tuner.matmul(x, w, number, None, other, 0.5)

    check(torch.vmap(torch.vmap(compute))(x, w), x @ w.mT * 0.5 + other)
    one = w[0, 0]
    check(torch.vmap(compute, in_dims=(1, None), out_dims=1)(x, one), x @ one.mT * 0.5 + other)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(ROWS, K + 1)}, "last dimension must be 24"),
        ({"x": torch.zeros(K)}, "at least two dimensions"),
        ({"w": torch.zeros(K, N)}, "last two dimensions must be 17 and 24"),
        ({"w": torch.zeros(3, N, K), "x": torch.zeros(2, ROWS, K)}, "must match"),
        ({"x": torch.zeros(ROWS, K, dtype=torch.float64)}, "kernels of this product read"),
        ({"w": torch.zeros(N, K, dtype=torch.bfloat16)}, "kernels of this product read"),
        ({"other": None}, "other must be given"),
        ({"other": torch.zeros(2, ROWS, N)}, "other has the shape .*it must be broadcast to"),
        ({"other": torch.zeros(N, dtype=torch.bfloat16)}, "kernels of this product read"),
        ({"layer": 5}, "no kernels for layer 5"),
        ({"x": torch.zeros(ROWS, K, requires_grad=True)}, "no derivative"),
        ({"w": torch.zeros(N, K, requires_grad=True)}, "no derivative"),
    ],
)
def test_operator_refuses_what_it_cannot_read(changes: dict[str, Any], reason: str) -> None:
    given = {
        "x": sample_x(ROWS, K),
        "w": sample_x(N, K),
        "layer": _layer().number,
        "other": sample_x(N),
        **changes,
    }
    with pytest.raises(RuntimeError, match=reason):
        torch.ops.gemm_tuner.matmul(**given)


def test_operators_for_weights_and_for_activations_are_not_mixed() -> None:
    ops, product = torch.ops.gemm_tuner, _layer()
    linear = add_layer([kernel_of(Problem.parse(f"f32 1..9x{N}x{K} nk"), 1)])
    x, w = sample_x(ROWS, K), sample_x(N, K)
    with pytest.raises(RuntimeError, match="product of two activations"):
        ops.pack(w, product.packed_bytes, product.number)
    with pytest.raises(RuntimeError, match="product of two activations"):
        ops.linear(x, sample_x(0).byte(), None, product.number)
    with pytest.raises(RuntimeError, match="called by linear"):
        ops.matmul(x, w, linear.number)
