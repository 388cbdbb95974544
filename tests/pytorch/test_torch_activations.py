"""Products of two activations that call kernels; skipped where PyTorch is not installed."""

import math
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_kernels import Kernels, kernel_of, with_wrong_tail  # noqa: E402 - after PyTorch was found
from torch_samples import HEADS, MATMUL, K, N, check, heads_of, operator_calls, passed, sample_x  # noqa: E402

from gemm_tuner.bench.reproduce import read_call  # noqa: E402
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer, WantedProduct  # noqa: E402

BATCH, ROWS = 2, 6
functional = torch.nn.functional


def _kernels(**changes: Any) -> Kernels:  # noqa: ANN401 - as a source takes them
    """Return a source whose kernels are for every number of rows here: each is built once."""
    return Kernels(rows=("1..9",), **changes)


def _in_groups(w: Any) -> Any:  # noqa: ANN401 - tensors
    """Return the matrices of each head for two heads, as grouped heads of attention have them."""
    batch, heads, *matrix = w.shape
    return w[:, :, None].expand(batch, heads, 2, *matrix).reshape(batch, heads * 2, *matrix)


X, W = (BATCH, ROWS, K), (BATCH, K, N)
# What is computed, of which arrays, and the epilogue and the layout of the kernel.
WRITTEN: dict[str, tuple[Any, Any, Any, str, str]] = {
    "bmm": (torch.bmm, X, W, "none", "kn"),
    "w of columns": (lambda x, w: x @ w.mT, X, (BATCH, N, K), "none", "nk"),
    "mm": (torch.mm, (ROWS, K), (K, N), "none", "kn"),
    "w of columns in mm": (functional.linear, (ROWS, K), (N, K), "none", "nk"),
    "heads": (lambda x, w: x @ w.mT, lambda: heads_of(ROWS), lambda: heads_of(N), "none", "nk"),
    "v of heads": (
        torch.matmul,
        lambda: heads_of(ROWS),
        lambda: heads_of(K, columns=N),
        "none",
        "kn",
    ),
    "grouped heads": (
        lambda x, w: x @ _in_groups(w).mT * 0.25 + x.new_ones(ROWS, 1).expand(ROWS, N),
        lambda: heads_of(ROWS, 2 * HEADS),
        lambda: heads_of(N),
        "scale+add",
        "nk",
    ),
    "one w for all heads": (
        lambda x, w: x @ w.expand(BATCH, HEADS, K, N),
        lambda: heads_of(ROWS),
        (BATCH, 1, K, N),
        "none",
        "kn",
    ),
    "einsum": (
        lambda x, w: torch.einsum("bmk,bnk->bmn", x, w),
        X,
        (BATCH, N, K),
        "none",
        "nk",
    ),
    "a cut of more": (lambda x, w: x[:, 1:7, :K] @ w, (BATCH, 9, K + 8), W, "none", "kn"),
    "a piece of more": (lambda x, w: x.chunk(2, -1)[0] @ w, (BATCH, ROWS, 2 * K), W, "none", "kn"),
    "baddbmm": (lambda x, w: torch.baddbmm(w[:, :1], x, w, alpha=0.5), X, W, "scale+add", "kn"),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w), (ROWS, K), (K, N), "bias", "kn"),
    "scaled, masked": (
        lambda x, w: x @ w.mT / math.sqrt(K) + w.new_ones(BATCH, 1, 1, N).cumsum(-1),
        lambda: heads_of(ROWS),
        lambda: heads_of(N),
        "scale+add",
        "nk",
    ),
    "weights times a number of x": (lambda x, w: x @ (w * x.sum()), X, W, "none", "kn"),
    "a function": (lambda x, w: functional.silu(torch.bmm(x, w) * 3), X, W, "scale+silu", "kn"),
    "a sum": (lambda x, w: (x @ w).relu() + x[..., :N], X, W, "relu+add", "kn"),
    "a sum of a batch": (  # PyTorch multiplies its rows at once
        lambda x, w: (functional.linear(y := x.unflatten(0, (2, -1)), w) + y[..., :N]).flatten(
            0, 1
        ),
        (ROWS, K),
        (N, K),
        "add",
        "nk",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_products_are_computed_where_their_arrays_lie(name: str, dtype: str) -> None:
    compute, *shapes, epilogue, layout = WRITTEN[name]
    x, w = (
        (one() if callable(one) else sample_x(*one)).to(getattr(torch, dtype)) for one in shapes
    )
    source, threads = _kernels(), 2
    torch.set_num_threads(threads)
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, compute, x, w)
        for bad in (0.0, float("nan"), float("inf")):
            x.select(-2, 2).add_(bad)
            check(graph(x, w), compute(x, w), equal_nan=True)
    assert operator_calls(graph, x, w) == {MATMUL: 1}
    [asked] = source.asked
    assert asked.threads == (1 if x.dim() > 2 else threads)  # a batch has a product for each
    assert (asked.rows, asked.epilogue, asked.w_layout) == ((ROWS,), epilogue, layout)
    [told] = enabled.report
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert told.problem.split(" of ")[-1].startswith(f"matmul {short} {ROWS}x{N}x{K} {layout}")
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


class _Attention(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Attention as it is written by hand: two products, and softmax between them."""

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:  # noqa: ANN401 - tensors
        q, k, v = (one.unflatten(-1, (HEADS, K)).transpose(1, 2) for one in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(K) + mask
        return torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).flatten(2)


def _attended(rows: int, dtype: str = "float32") -> list[Any]:
    shapes = (BATCH, rows, HEADS * K), (BATCH, N, HEADS * K), (BATCH, N, HEADS * K)
    mask = torch.where(torch.arange(N) < N - 3, 0.0, -1e4).to(getattr(torch, dtype))
    return [*(sample_x(*shape, dtype=dtype) for shape in shapes), mask.expand(BATCH, 1, rows, N)]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_calls_kernels_for_both_products(dtype: str) -> None:
    model, inputs, source = _Attention(), _attended(ROWS, dtype), _kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(model)
        check(compiled(*inputs), model(*inputs))
        assert operator_calls(compiled, *inputs) == {MATMUL: 2}
    assert [one.problem.split(" ", 4)[-1] for one in enabled.report] == [
        f"{ROWS}x{N}x{K} nk scale+add",
        f"{ROWS}x{K}x{N} kn none",
    ]
    assert len(enabled.report.taken) == 2


@pytest.mark.usefixtures("loops_by_operators")
def test_attention_is_compiled_for_any_number_of_rows() -> None:
    model = _Attention()
    enabled = gt.enable(_kernels(), dynamic_rows=["1..9"])
    compiled = torch.compile(model)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 2, 9, 10):  # the last by PyTorch's operators
            inputs = _attended(rows)
            torch._dynamo.mark_dynamic(inputs[0], 1)
            torch._dynamo.mark_dynamic(inputs[3], 2)
            check(compiled(*inputs), model(*inputs))
            assert operator_calls(compiled, *inputs) == {MATMUL: 2}
    assert {one.rows for one in enabled.report.taken} == {("1..9",)}


class _Planted(Kernels):
    """Has a wrong kernel where w is of columns."""

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return a kernel."""
        if not isinstance(wanted, WantedProduct) or wanted.w_layout != "nk":
            return super().find(wanted)
        [problem] = wanted.problems
        kernel = kernel_of(problem, wanted.threads, with_wrong_tail)
        return FoundLayer(kernels=(kernel,), reasons=())


@pytest.mark.usefixtures("loops_by_operators")
def test_a_wrong_product_of_activations_is_named(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    gt.enable(_Planted())

    found = gt.debug(_Attention(), tuple(_attended(ROWS)), folder=tmp_path / "found")

    wrong, right = found.layers
    assert found.wrong == wrong.name
    assert wrong.problem == f"matmul f32 {ROWS}x{N}x{K} nk scale+add"
    assert "in product 0 of its batch" in wrong.why_wrong
    assert f", {N - 1}] is" in wrong.why_wrong
    assert "is wrong by itself" in found.verdict
    assert right.share <= 1
    assert right.seconds > 0
    assert "is wrong" in (tmp_path / "found" / "index.md").read_text()
    call = read_call(tmp_path / "found" / "wrong_call")
    assert call.error is not None
    assert f", {N - 1}] is" in call.error


def test_without_a_kernel_the_graph_is_as_before() -> None:
    inputs, source = _attended(ROWS), _kernels(lack=lambda _wanted: True)
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, _Attention(), *inputs)
        plain = passed(lambda _graph: None, _Attention(), *inputs)
    assert graph.code == plain.code
    assert [one.epilogue for one in source.asked] == ["scale+add", "scale", "none", "none"]
    assert not enabled.report.taken
    assert len(enabled.report) == 2


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x, w: x.reshape(BATCH, K, ROWS).mT @ w, "x does not lie in dense rows"),
        (lambda x, w: x @ w.repeat(1, 1, 2)[:, :, ::2], "w lies in no dense rows or columns"),
        (lambda x, w: torch.baddbmm(w[:, :1], x, w, beta=2), "is scaled"),
        (lambda x, w: torch.baddbmm(w[:, :1], x / 0, w, alpha=0), "multiplied by 0"),
    ],
)
def test_the_report_says_why_a_product_is_left(compute: Any, reason: str) -> None:  # noqa: ANN401
    x, w, source = sample_x(*X), sample_x(*W), _kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, compute, x, w)
        check(graph(x, w), compute(x, w))
    assert not source.asked
    [told] = enabled.report
    assert reason in told.reason


def test_a_product_whose_columns_are_not_known_is_left() -> None:
    x, w = sample_x(*X), sample_x(*W)
    enabled = gt.enable(_kernels())
    with torch.no_grad():
        graph = passed(enabled, torch.bmm, x, w, tracing_mode="symbolic")
        check(graph(x, w), torch.bmm(x, w))
    [told] = enabled.report
    assert told.reason.startswith("its n is known when it runs")


@pytest.mark.parametrize(
    "compute",
    [torch.bmm, lambda x, w: torch.bmm(x, w) + x.new_ones(w.shape[0], 1, w.shape[2])],
)
def test_lengths_that_are_known_when_it_runs_are_not_fixed(compute: Any) -> None:  # noqa: ANN401
    x, w, enabled = sample_x(*X), sample_x(*W), gt.enable(_kernels())
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        graph = make_fx(compute, tracing_mode="symbolic")(x, w).graph
        shapes = next(iter(graph.nodes)).meta["val"].fake_mode.shape_env
        before = len(shapes.guards)
        enabled(graph)
    assert len(shapes.guards) == before, shapes.guards[before:]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, w: w.mT @ x.mT,  # weights on the left
        lambda x, w: x @ (w * 2),  # freezing computes it
        lambda x, _w: (x.double() @ x.double().mT).float(),
        lambda x, _w: x[:, :0] @ x.mT,
        lambda x, _w: x[..., :0] @ x[..., :0].mT,
    ],
)
def test_other_products_are_left(compute: Any) -> None:  # noqa: ANN401 - a function
    x, w, source = sample_x(*X), sample_x(*W), _kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda x: compute(x, w), x)
        check(graph(x), compute(x, w))
    assert not source.asked
