"""Batches of products with constant weights that call kernels; skipped without PyTorch."""

from typing import Any

import pytest

from gemm_tuner.domain.problem import Problem

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels, kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import LINEAR, K, N, check, operator_calls, passed, sample_x  # noqa: E402

from gemm_tuner.torch.operators import add_layer  # noqa: E402

BATCH, ROWS = 3, 6
functional = torch.nn.functional


def _apart(*shape: int) -> Any:  # noqa: ANN401 - a tensor
    """Return an array whose products, rows and columns are farther apart than they need be."""
    return sample_x(*(length + 3 for length in shape))[tuple(slice(one) for one in shape)]


X, W = (BATCH, ROWS, K), (BATCH, K, N)
WRITTEN: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], str]] = {
    "bmm": (lambda x, w, _b: torch.bmm(x, w), X, W, "none"),
    "a function": (lambda x, w, _b: functional.silu(torch.bmm(x, w)), X, W, "silu"),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b[:, None], x, w), X, W, "bias"),
    "a bias of each": (lambda x, w, b: functional.gelu(x @ w + b[:, None]), X, W, "bias+gelu_erf"),
    "a bias of all": (lambda x, w, b: functional.relu(b[0] + x @ w), X, W, "bias+relu"),
    "an array": (lambda x, w, _b: x @ w[:, :, :K] + x, X, (BATCH, K, K), "add"),
    "einsum": (
        lambda x, w, b: torch.einsum("bmk,bkn->bmn", x, w).relu() + b[:, None],
        X,
        W,
        "relu",
    ),
    "einsum of rows first": (
        lambda x, w, b: functional.relu(torch.einsum("mbk,bkn->mbn", x, w) + b),
        (ROWS, BATCH, K),
        W,
        "none",
    ),
    "experts of one x": (lambda x, w, _b: x @ w, (ROWS, K), W, "none"),
    "weights of rows": (lambda x, w, _b: x @ w.mT, X, (BATCH, N, K), "none"),
    "one product": (lambda x, w, _b: torch.bmm(x, w), (1, ROWS, K), (1, K, N), "none"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_batches_are_computed_however_they_are_written(name: str, dtype: str) -> None:
    compute, x_shape, w_shape, epilogue = WRITTEN[name]
    x, w = (_apart(*shape).to(getattr(torch, dtype)) for shape in (x_shape, w_shape))
    bias = sample_x(BATCH, N, dtype=dtype)
    source = Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda x: compute(x, w, bias), x)
        for bad in (0.0, float("nan"), float("inf")):
            x[0, 2] += bad
            y, expected = graph(x), compute(x, w, bias)
            check(y, expected, equal_nan=True)
            assert y.stride() == expected.stride()
    assert operator_calls(graph, x)[LINEAR] == 1
    assert [(one.rows, one.epilogue) for one in source.asked] == [((ROWS,), epilogue)]
    many = f"{BATCH} of " if len(w) > 1 else ""
    assert [one.problem.removeprefix(many)[:3] for one in enabled.report] in (["f32"], ["bf1"])


def test_a_bias_of_another_type_is_added_after_the_product() -> None:
    x, w, bias = sample_x(*X), sample_x(*W), sample_x(BATCH, 1, N)
    source = Kernels()
    enabled = gt.enable(source)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = passed(enabled, lambda x: torch.bmm(x, w) + bias, x)
        check(graph(x), torch.bmm(x, w) + bias)
    assert [(one.dtype, one.epilogue) for one in source.asked] == [("bf16", "none")]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: torch.bmm(x, w[:1].expand(BATCH, K, N)),  # packed, they would be repeated
        lambda x, w: x.expand(2, *X) @ w,
        lambda x, w: torch.baddbmm(x.new_ones(X[0], ROWS, N), x, w, alpha=2),
        lambda x, w: torch.bmm(x.double(), w.double()),
        lambda x, w: torch.bmm(x[:, :0], w),
        lambda x, w: torch.bmm(x[..., :0], w[:, :0]),
        lambda x, w: torch.bmm(w.mT, x.mT),
    ],
)
def test_other_batches_are_left(compute: Any) -> None:  # noqa: ANN401 - a function
    x, w, source = sample_x(*X), sample_x(*W), Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda x: compute(x, w), x)
        check(graph(x), compute(x, w))
    assert not source.asked


def test_a_batch_without_a_kernel_is_left() -> None:
    x, w = sample_x(*X), sample_x(*W)
    enabled = gt.enable(Kernels(lack=lambda _wanted: True))
    with torch.no_grad():
        graph = passed(enabled, lambda x: torch.relu(x @ w), x)
        check(graph(x), torch.relu(x @ w))
    assert not operator_calls(graph, x)
    assert [one.is_taken for one in enabled.report] == [False]


class _Experts(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(sample_x(*W) / 8)
        self.bias = torch.nn.Parameter(sample_x(BATCH, N))
        self.down = torch.nn.Parameter(sample_x(BATCH, N, K) / 8)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        hidden = functional.silu(torch.einsum("bmk,bkn->bmn", x, self.up) + self.bias[:, None])
        return torch.bmm(hidden, self.down) + x


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_compiled_for_any_number_of_rows(dtype: str) -> None:
    model = _Experts().to(getattr(torch, dtype)).eval()
    tuned = gt.enable(Kernels(rows=("1..8",)), dynamic_rows=["1..8"])
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 2, 8, 9):  # the last by PyTorch's operators
            x = sample_x(rows, BATCH, K, dtype=dtype).transpose(0, 1)
            check(compiled(x), model(x))
            assert operator_calls(compiled, x) == {LINEAR: 2}  # no weights are packed
    assert [one.problem.split()[-1] for one in tuned.report] == ["bias+silu", "add"]
    assert gt.debug(compiled, sample_x(BATCH, 4, K, dtype=dtype)).wrong is None


def _layer(epilogue: str = "bias") -> Any:  # noqa: ANN401 - a layer
    return add_layer([kernel_of(Problem.parse(f"f32 1..9x{N}x{K} nk {epilogue}"), 1)])


def test_operators_for_batches_hold_what_pytorch_asks_of_them() -> None:
    layer, ops = _layer("bias+relu+add"), torch.ops.gemm_tuner
    w, x, bias = sample_x(BATCH, N, K), sample_x(*X), sample_x(BATCH, N)
    other = sample_x(BATCH, ROWS, N)
    packed = ops.pack(w, layer.packed_bytes, layer.number)

    torch.library.opcheck(ops.pack.default, (w, layer.packed_bytes, layer.number))
    torch.library.opcheck(ops.linear.default, (x, packed, bias, layer.number, other))
    for one in (bias, bias[0]):
        y = torch.relu(x @ w.mT + (one if one.dim() == 1 else one[:, None])) + other
        check(ops.linear(x, packed, one, layer.number, other), y)
    for product in range(BATCH):
        alone = ops.pack(w[product], layer.packed_bytes, layer.number)
        assert torch.equal(packed[product], alone)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches_are_dealt_out_to_the_threads_of_pytorch(threads: int, batch: int) -> None:
    layer, ops = _layer("none"), torch.ops.gemm_tuner
    w, x = sample_x(batch, N, K), sample_x(batch, ROWS, K)
    torch.set_num_threads(threads)
    packed = ops.pack(w, layer.packed_bytes, layer.number)
    check(ops.linear(x, packed, None, layer.number), x @ w.mT)
    for strange in (
        x[:, :1].expand(x.shape),
        x[:1].expand(x.shape),
        x.mT.contiguous().mT,
        x[:, :0],
    ):
        check(ops.linear(strange, packed, None, layer.number), strange @ w.mT)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(ROWS, K)}, r"must be \(3, rows, 24\)"),
        ({"x": torch.zeros(BATCH - 1, ROWS, K)}, "weights of 3 products"),
        ({"x": torch.zeros(BATCH, ROWS, K + 1)}, "last dimension"),
        ({"x": torch.zeros(BATCH, 10, K)}, "no kernel of this layer is for 10 rows"),
        ({"bias": torch.zeros(BATCH - 1, N)}, "or as many for each product"),
        ({"bias": torch.zeros(BATCH, N - 1)}, "or as many for each product"),
        ({"bias": torch.zeros(BATCH, 1, N)}, "or as many for each product"),
        ({"packed": torch.zeros(BATCH, 3, dtype=torch.uint8)}, "gemm_tuner::pack"),
    ],
)
def test_operators_refuse_batches_that_they_cannot_read(
    changes: dict[str, Any], reason: str
) -> None:
    layer, ops = _layer(), torch.ops.gemm_tuner
    packed = ops.pack(sample_x(BATCH, N, K), layer.packed_bytes, layer.number)
    given = {"x": sample_x(*X), "packed": packed, "bias": sample_x(N), "layer": layer.number}

    with pytest.raises(RuntimeError, match=reason):
        ops.linear(**{**given, **changes})
    with pytest.raises(RuntimeError, match="or a batch of these"):
        ops.pack(sample_x(BATCH, K, N), layer.packed_bytes, layer.number)
