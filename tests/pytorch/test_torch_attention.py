"""The operator for attention; skipped where PyTorch is not installed."""

from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.domain.problem import Problem

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_kernels import kernel_of  # noqa: E402 - after PyTorch was found
from torch_samples import HEADS, K, N, check, heads_of, sample_x  # noqa: E402

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.torch.inductor.exporting import load_kernels, write_kernels  # noqa: E402
from gemm_tuner.torch.operators import OperatorLayer, add_layer  # noqa: E402

BATCH, ROWS, SCALE = 2, 6, 0.3
attend = torch.nn.functional.scaled_dot_product_attention


def _layer(steps: str = "scale+add", rows: str = "1..9") -> OperatorLayer:
    problem = Problem.parse(f"attention f32 {rows}x{N}x{K} {steps}")
    return add_layer([kernel_of(problem, 1)])


def _hidden_row() -> Any:  # noqa: ANN401 - a tensor
    mask = sample_x(ROWS, N)
    mask[2], mask[4, :5] = -torch.inf, -torch.inf
    return mask


def _sample_q() -> Any:  # noqa: ANN401 - a tensor
    return heads_of(ROWS)


def _sample_k() -> Any:  # noqa: ANN401 - a tensor
    return heads_of(N)


# Queries; keys, and values like them; a mask.
STRIDES: dict[str, tuple[Any, Any, Any]] = {
    "heads side by side": (_sample_q, _sample_k, lambda: sample_x(ROWS, N)),
    "heads apart": (
        lambda: sample_x(BATCH, HEADS, ROWS, K),
        lambda: sample_x(BATCH, HEADS, N, K),
        lambda: sample_x(BATCH, HEADS, ROWS, N),
    ),
    "cut from one array": (
        lambda: heads_of(ROWS, columns=3 * K)[..., K : 2 * K],
        lambda: heads_of(2 * N, columns=3 * K)[:, :, ::2, :K],
        lambda: sample_x(1, HEADS, ROWS, N),
    ),
    "grouped heads": (
        lambda: heads_of(ROWS, 2 * HEADS),
        _sample_k,
        lambda: sample_x(BATCH, 2 * HEADS, ROWS, 2 * N)[..., N:],
    ),
    "grouped heads, one mask": (
        lambda: heads_of(ROWS, 2 * HEADS),
        _sample_k,
        lambda: sample_x(BATCH, 1, 1, N),
    ),
    "one head of keys": (_sample_q, lambda: heads_of(N, 1), lambda: sample_x(1, 1, ROWS, N)),
    "one batch of keys": (
        _sample_q,
        lambda: sample_x(1, HEADS, N, K).expand(BATCH, HEADS, N, K),
        lambda: sample_x(ROWS, 1).expand(ROWS, N),
    ),
    "one row": (lambda: heads_of(1), _sample_k, lambda: sample_x(1, N)),
    "one row of grouped heads": (
        lambda: heads_of(1, 4 * HEADS),
        _sample_k,
        lambda: sample_x(BATCH, 4 * HEADS, 1, N),
    ),
    "one row of grouped heads, a mask of each": (
        lambda: sample_x(BATCH, 4 * HEADS, 1, K),
        _sample_k,
        lambda: sample_x(4 * HEADS, 1, N),
    ),
    "one row of grouped heads, one mask": (
        lambda: heads_of(1, 9),
        lambda: heads_of(N, 1),
        lambda: sample_x(BATCH, 1, 1, N),
    ),
    "one row of more heads than kernels": (
        lambda: heads_of(1, 10),
        lambda: heads_of(N, 1),
        lambda: sample_x(1, N),
    ),
    "a row that sees no key": (_sample_q, _sample_k, _hidden_row),
    "columns apart": (
        lambda: heads_of(K, columns=ROWS).mT,
        lambda: heads_of(K, columns=N).mT,
        lambda: sample_x(N, ROWS).mT,
    ),
    "no row": (lambda: heads_of(0), _sample_k, lambda: sample_x(1, N)),
    "no batch": (
        lambda: sample_x(0, HEADS, ROWS, K),
        lambda: sample_x(0, HEADS, N, K),
        lambda: sample_x(ROWS, N),
    ),
    "more rows than kernels": (lambda: heads_of(10), _sample_k, lambda: sample_x(10, N)),
    "more rows than kernels, apart": (
        lambda: heads_of(K, columns=10).mT,
        _sample_k,
        lambda: sample_x(10, N),
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", STRIDES)
def test_operator_reads_arrays_of_any_strides(name: str, threads: int) -> None:
    q, k, mask = (make() for make in STRIDES[name])
    v, layer = torch.randn_like(k), _layer()
    torch.set_num_threads(threads)
    y = torch.ops.gemm_tuner.attention(q, k, v, layer.number, mask, SCALE)
    check(y, attend(q, k, v, mask, scale=SCALE, enable_gqa=True))
    assert y.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("steps", ["scale+add+causal", "scale+causal", "causal", "none"])
def test_operator_hides_keys_as_pytorch_does(steps: str, threads: int) -> None:
    q, k, v, layer = heads_of(N), heads_of(N), heads_of(N), _layer(steps, f"{N}")
    mask = sample_x(N, N) if "add" in steps else None
    torch.set_num_threads(threads)
    y = torch.ops.gemm_tuner.attention(q, k, v, layer.number, mask, SCALE)
    scale, is_causal = SCALE if "scale" in steps else 1.0, "causal" in steps
    check(y, attend(q, k, v, mask, is_causal=is_causal, scale=scale))
    assert y.transpose(1, 2).flatten(2).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("keys", [1, 9, 30, 31])
def test_a_call_says_how_many_keys_there_are(keys: int) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"attention f32 1..9x1..30x{K} scale+add"), 1)])
    q, k, v, mask = heads_of(ROWS, 2 * HEADS), heads_of(keys), heads_of(keys), sample_x(ROWS, keys)
    y = torch.ops.gemm_tuner.attention(q, k, v, layer.number, mask, SCALE)
    check(y, attend(q, k, v, mask, scale=SCALE, enable_gqa=True))


def test_a_range_of_keys_is_written_and_read_again(tmp_path: Path) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"attention f32 1..9x1..30x{K} scale+add"), 1)])

    write_kernels(tmp_path, [layer])

    assert f"layer {layer.number} 1..30 {K} " in (tmp_path / "layers.txt").read_text()
    load_kernels(tmp_path)  # which asks each kernel whether it is of its layer
    text = (tmp_path / "layers.txt").read_text()
    (tmp_path / "layers.txt").write_text(text.replace(" 1..30 ", " 2..30 "))
    with pytest.raises(InvalidSetting, match="not of the layer that it is listed for"):
        load_kernels(tmp_path)


def test_operator_holds_what_pytorch_asks_of_it() -> None:
    q, k, v, number = heads_of(ROWS, 2 * HEADS), heads_of(N), heads_of(N), _layer().number
    operator, mask = torch.ops.gemm_tuner.attention, sample_x(ROWS, N)
    torch.library.opcheck(operator.default, (q, k, v, number, mask, SCALE))

    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        operator(q, k, v, number, mask)
    assert counter.get_total_flops() == 4 * BATCH * 2 * HEADS * ROWS * N * K


def test_recorded_tensors_have_the_derivative_of_pytorch() -> None:
    arrays, layer = [heads_of(ROWS, 2 * HEADS), heads_of(N), heads_of(N)], _layer()
    mask = _hidden_row()
    gradients = []
    ways: list[Any] = [
        lambda *given: torch.ops.gemm_tuner.attention(*given, layer.number, mask, SCALE),
        lambda *given: attend(*given, mask, scale=SCALE, enable_gqa=True),
    ]
    for compute in ways:
        given = [one.detach().requires_grad_() for one in arrays]
        compute(*given).square().sum().backward()
        gradients.append([one.grad for one in given])
    check(*gradients)


@pytest.mark.parametrize("how", ["plain", "recorded", "without memory"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.zeros(2, HEADS, ROWS, K + 1)}, r"must be \(batch, heads, rows, 24\)"),
        ({"q": torch.zeros(HEADS, ROWS, K)}, r"must be \(batch, heads, rows, 24\)"),
        ({"q": torch.zeros(2, 4, ROWS, K)}, "q has 4 heads and k 3"),
        ({"k": torch.zeros(1, HEADS, N, K)}, r"must be \(2, heads, 17, 24\)"),
        ({"k": torch.zeros(2, HEADS, N + 1, K)}, r"must be \(2, heads, 17, 24\)"),
        ({"v": torch.zeros(2, HEADS, N, K + 1)}, "it must be that of k"),
        ({"v": torch.zeros(2, HEADS, N, K, dtype=torch.float64)}, "kernels of this product read"),
        ({"mask": None}, "mask must be given"),
        ({"mask": torch.zeros(ROWS, N) > 0}, "mask is of Bool"),
        ({"mask": torch.zeros(3, 1, ROWS, N)}, "must be broadcast to that of scores"),
        ({"layer": 5}, "no kernels for layer 5"),
    ],
)
def test_operator_refuses_what_it_cannot_read(
    changes: dict[str, Any], reason: str, how: str
) -> None:
    given = {
        "q": heads_of(ROWS),
        "k": heads_of(N),
        "v": heads_of(N),
        "layer": _layer().number,
        "mask": sample_x(N),
        **changes,
    }
    given["v"] = given["v"].detach().requires_grad_(how == "recorded")
    if how == "without memory":
        for name in ("q", "k", "v", "mask"):
            given[name] = given[name] if given[name] is None else given[name].to("meta")
    with pytest.raises(RuntimeError, match=reason):
        torch.ops.gemm_tuner.attention(**given)


def test_layers_are_called_by_the_operator_that_they_are_for() -> None:
    ops, attention, causal = torch.ops.gemm_tuner, _layer(), _layer("causal", "1..20")
    product = add_layer([kernel_of(Problem.parse(f"matmul f32 1..9x{N}x{K} nk"), 1)])
    q, k = heads_of(ROWS), heads_of(N)
    with pytest.raises(RuntimeError, match="called by matmul"):
        ops.attention(q, k, k, product.number)
    with pytest.raises(RuntimeError, match="called by attention"):
        ops.matmul(q, k, attention.number)
    with pytest.raises(RuntimeError, match="which attention computes"):
        ops.linear(q, sample_x(0).byte(), None, attention.number)
    with pytest.raises(RuntimeError, match="causal attention is of as many of both"):
        ops.attention(q, k, k, causal.number)
