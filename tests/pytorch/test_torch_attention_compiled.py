"""Attention that torch.compile compiles calls kernels; skipped where PyTorch is not installed."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels, kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import ATTENTION, HEADS, K, N, check, heads_of, operator_calls, passed, sample_x  # noqa: E402

from gemm_tuner.bench.reproduce import read_call  # noqa: E402
from gemm_tuner.errors import InvalidInput  # noqa: E402
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer, WantedProduct  # noqa: E402

BATCH, ROWS, COLUMNS = 2, 6, HEADS * K
attend = torch.nn.functional.scaled_dot_product_attention
clone = torch.ops.aten.clone.default


def _kernels(**changes: Any) -> Kernels:  # noqa: ANN401 - as a source takes them
    """Return a source whose kernels are for every number of rows here: each is built once."""
    return Kernels(rows=("1..9",), **changes)


def _repeated(given: Any) -> Any:  # noqa: ANN401 - tensors
    """Return each head twice, as models write grouped heads."""
    batch, heads, *matrix = given.shape
    return given[:, :, None].expand(batch, heads, 2, *matrix).reshape(batch, heads * 2, *matrix)


def _hidden(rows: int = ROWS) -> Any:  # noqa: ANN401 - a tensor
    """Return which keys are seen: none in one row."""
    seen = torch.rand(rows, N) > 0.3
    seen[2] = False
    return seen


def _causal(**words: Any) -> Any:  # noqa: ANN401 - a function
    return lambda q, k, v: attend(q, k, v, is_causal=True, **words)


# What is computed, the rows and the heads of q, and the steps of the kernel.
WRITTEN: dict[str, tuple[Any, int, int, str]] = {
    "plain": (attend, ROWS, HEADS, "scale"),
    "a scale": (lambda q, k, v: attend(q, k, v, scale=2), ROWS, HEADS, "scale"),
    "causal": (_causal(), N, HEADS, "scale+causal"),
    "causal, masked": (
        lambda q, k, v: attend(q, k, v, k[0, 0, :, :1] * q.new_ones(N), is_causal=True),
        N,
        HEADS,
        "scale+add+causal",
    ),
    "a mask of each row": (
        lambda q, k, v: attend(q, k, v, q[0, 0, :, :N] * 3),
        ROWS,
        HEADS,
        "scale+add",
    ),
    "a mask of each batch": (
        lambda q, k, v: attend(q, k, v, k[:, :1, None, :, 0].contiguous()),
        ROWS,
        HEADS,
        "scale+add",
    ),
    "a mask of each head": (
        lambda q, k, v: attend(q, k, v, k.sum(-1)[..., None, :].expand(-1, -1, ROWS, -1)),
        ROWS,
        HEADS,
        "scale+add",
    ),
    "keys that are seen": (
        lambda q, k, v: attend(q, k, v, q[0, 0, :, :N] > 0),
        ROWS,
        HEADS,
        "scale+add",
    ),
    "grouped heads": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        ROWS,
        2 * HEADS,
        "scale",
    ),
    "one query of heads that share keys": (
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        1,
        4 * HEADS,
        "scale",
    ),
    "one query of repeated heads": (
        lambda q, k, v: attend(q, _repeated(k), _repeated(v)),
        1,
        2 * HEADS,
        "scale",
    ),
    "repeated heads": (
        lambda q, k, v: attend(q, _repeated(k), _repeated(v)),
        ROWS,
        2 * HEADS,
        "scale",
    ),
    "repeated heads, each group in a batch of its own": (
        lambda q, k, v: attend(
            *(one.reshape(BATCH * HEADS, 2, -1, K) for one in (q, _repeated(k), _repeated(v)))
        ),
        ROWS,
        2 * HEADS,
        "scale",
    ),
    "copied keys": (
        lambda q, k, v: attend(q, k.contiguous(), v.clone()),
        ROWS,
        HEADS,
        "scale",
    ),
    "rows of keys repeated": (
        lambda q, k, v: attend(q, k[:, :1].expand(k.shape), v),
        ROWS,
        HEADS,
        "scale",
    ),
}


COPIES = {"a mask of each batch": 1, "repeated heads, each group in a batch of its own": 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_attention_is_computed_where_its_arrays_lie(name: str, dtype: str) -> None:
    compute, rows, heads, steps = WRITTEN[name]
    arrays = heads_of(rows, heads), heads_of(N), heads_of(N)
    q, k, v = (one.to(getattr(torch, dtype)) for one in arrays)
    source = _kernels() if rows <= 9 else Kernels()
    torch.set_num_threads(2)
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, compute, q, k, v)
        for factor in (1.0, 40.0):  # the second lets one key have nearly all weight
            q.mul_(factor)
            expected, y = compute(q, k, v), graph(q, k, v)
            check(y, expected)
            assert y.stride() == expected.stride()
    assert operator_calls(graph, q, k, v) == {ATTENTION: 1}
    [asked] = source.asked
    assert isinstance(asked, WantedProduct)
    assert (asked.operation, asked.threads) == ("attention", 1)  # each head is one of many
    joined = heads // HEADS if rows == 1 else 1  # heads of one query each are rows of one
    rows *= joined
    assert (asked.rows, asked.n, asked.k, asked.epilogue) == ((rows,), N, K, steps)
    [told] = enabled.report
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert told.problem == f"{BATCH * heads // joined} of attention {short} {rows}x{N}x{K} {steps}"
    copies = graph.graph.find_nodes(op="call_function", target=clone)
    assert len(copies) == COPIES.get(name, 0)


class _Layer(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Attention over rows that hold the heads side by side, as projections write them."""

    def forward(self, q: Any, k: Any, v: Any, seen: Any) -> Any:  # noqa: ANN401 - tensors
        q, k, v = (one.unflatten(-1, (HEADS, K)).transpose(1, 2) for one in (q, k, v))
        return attend(q, k, v, seen).transpose(1, 2).flatten(2)


def _rows_of(batch: int = BATCH, rows: int = ROWS, dtype: str = "float32") -> list[Any]:
    shapes = (batch, rows, COLUMNS), (batch, N, COLUMNS), (batch, N, COLUMNS)
    return [*(sample_x(*shape, dtype=dtype) for shape in shapes), _hidden(rows)]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_layer_calls_a_kernel(mode: Any) -> None:  # noqa: ANN401 - a context
    model, inputs, source = _Layer(), _rows_of(), _kernels()
    inputs[0].requires_grad_()
    enabled = gt.enable(source)
    with mode():
        compiled = torch.compile(model)
        check(compiled(*inputs), model(*inputs))
        assert operator_calls(compiled, *inputs) == {ATTENTION: 1}
    assert len(enabled.report.taken) == 1

    y = compiled(*inputs)  # which is recorded now, and so is compiled as it would be without
    assert y.requires_grad
    assert len(source.asked) == 1


@pytest.mark.usefixtures("loops_by_operators")
def test_attention_is_compiled_for_any_batch_and_number_of_rows() -> None:
    model, threads = _Layer(), torch.get_num_threads()
    source = _kernels()
    enabled = gt.enable(source, dynamic_rows=["1..9"])
    compiled = torch.compile(model)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, rows in ((2, 4), (3, 5), (5, 9), (4, 10)):  # the last by PyTorch's operator
            inputs = _rows_of(batch, rows)
            for one in inputs[:3]:
                torch._dynamo.mark_dynamic(one, 0)
            torch._dynamo.mark_dynamic(inputs[0], 1)
            torch._dynamo.mark_dynamic(inputs[3], 0)
            check(compiled(*inputs), model(*inputs))
            assert operator_calls(compiled, *inputs) == {ATTENTION: 1}
    assert {one.rows for one in enabled.report.taken} == {("1..9",)}
    assert {one.threads for one in source.asked} == {threads}


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (_causal(), "it is causal and has not as many rows as keys"),
        (
            lambda q, k, v: attend(q[:, :, :1].expand(q.shape), k, v),
            "q does not lie in dense rows",
        ),
        (
            lambda q, k, v: attend(q, k, v[:, :, :1].expand(v.shape)),
            "v does not lie in dense rows",
        ),
        (
            lambda q, k, v: sum(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[1:],
                torch.zeros(()),
            ),
            "more is read of it than its result",
        ),
        (
            lambda *given: attend(*(one.repeat(1, 1, 1, 11) for one in given)),
            "heads of 264 elements are not supported",
        ),
    ],
)
def test_the_report_says_why_attention_is_left(compute: Any, reason: str) -> None:  # noqa: ANN401
    arrays = heads_of(ROWS), heads_of(N), heads_of(N)
    enabled = gt.enable(_kernels())
    with torch.no_grad():
        graph = passed(enabled, compute, *arrays)
        check(graph(*arrays), compute(*arrays))
    [told] = enabled.report
    assert not told.is_taken
    assert reason in told.reason
    assert " scale" in told.problem


@pytest.mark.usefixtures("loops_by_operators")
def test_attention_whose_keys_are_not_counted_is_left() -> None:
    arrays = [heads_of(ROWS), heads_of(N), heads_of(N)]
    enabled = gt.enable(_kernels())
    for one in arrays[1:]:
        torch._dynamo.mark_dynamic(one, 2)
    with torch.no_grad():
        check(torch.compile(attend)(*arrays), attend(*arrays))
    [told] = enabled.report
    assert told.reason.startswith("its keys are known when it runs; give dynamic_keys")


@pytest.mark.usefixtures("loops_by_operators")
def test_a_cache_grows_without_being_compiled_again() -> None:
    source = Kernels()
    enabled = gt.enable(source, dynamic_keys="1..40")
    compiled = torch.compile(attend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for keys in (N, N + 1, 40, 41):  # the last by PyTorch's operator
            arrays = heads_of(1), heads_of(keys), heads_of(keys)
            for one in arrays[1:]:
                torch._dynamo.mark_dynamic(one, 2)
            check(compiled(*arrays), attend(*arrays))
            assert operator_calls(compiled, *arrays) == {ATTENTION: 1}
    [told] = enabled.report.taken
    assert told.problem == f"{BATCH * HEADS} of attention f32 1x1..40x{K} scale"


@pytest.mark.parametrize("keys", ["40", "40..1", "some", ["1..40"], (1, 40), 40])
def test_dynamic_keys_are_a_range(keys: Any) -> None:  # noqa: ANN401 - any input
    with pytest.raises(InvalidInput, match=r"n = |no range|no text"):
        gt.enable(Kernels(), dynamic_keys=keys)


def test_without_a_kernel_the_graph_is_as_before() -> None:
    inputs, source = _rows_of(), _kernels(lack=lambda _wanted: True)
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, _Layer(), *inputs)
        plain = passed(lambda _graph: None, _Layer(), *inputs)
    assert graph.code == plain.code
    assert [one.epilogue for one in source.asked] == ["scale+add"]
    assert [one.is_taken for one in enabled.report] == [False]


@pytest.mark.parametrize(
    "compute",
    [
        lambda q, k, _v: attend(k, k, k).sum() * q,  # freezing computes it
        lambda q, k, v: attend(*(one.double() for one in (q, k, v))).float(),
        lambda q, k, v: attend(q[:, :, :0], k, v),
    ],
)
def test_other_attention_is_left(compute: Any) -> None:  # noqa: ANN401 - a function
    q, k, v = heads_of(ROWS), heads_of(N), heads_of(N)
    source = _kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda q: compute(q, k, v), q)
        check(graph(q), compute(q, k, v))
    assert not source.asked


class _Planted(Kernels):
    """Has kernels that are wrong in the last column of values."""

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return a kernel."""
        assert isinstance(wanted, WantedProduct)
        [problem] = wanted.problems
        kernel = kernel_of(problem, wanted.threads, _with_wrong_column)
        return FoundLayer(kernels=(kernel,), reasons=())


def _with_wrong_column(text: str) -> str:
    right = "write_row(call.y + (row + local)"
    assert right in text
    return text.replace(right, f"state.sums[local * width + k - 1] *= 1.01f, {right}")


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("source", [_kernels, _Planted])
def test_debug_judges_attention(source: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a source
    torch.set_num_threads(1)
    gt.enable(source())

    found = gt.debug(_Layer(), tuple(_rows_of()), folder=tmp_path / "found")

    [layer] = found.layers
    assert layer.problem.startswith("attention f32 ")
    assert layer.calls == 1
    assert layer.seconds > 0
    if source is _kernels:
        assert 0 < layer.share <= 1
        return
    assert found.wrong == layer.name
    assert f", {K - 1}] is" in layer.why_wrong
    assert "is wrong by itself" in found.verdict
    call = read_call(tmp_path / "found" / "wrong_call")
    assert call.v is not None
    assert not call.v[:, : K - 1].any()
    assert call.error is not None
    assert f", {K - 1}] is" in call.error
