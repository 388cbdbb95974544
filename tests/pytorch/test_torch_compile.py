"""Models that torch.compile compiled with kernels; skipped where PyTorch is not installed."""

import copy
import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.errors import InvalidInput, InvalidSetting, StoreFailed

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    HIDDEN,
    LINEAR,
    K,
    N,
    check,
    operator_calls,
    passed,
    sample_model,
    sample_x,
)

from gemm_tuner.layers.sources import FoundLayer, WantedLayer  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)])
def test_a_compiled_model_calls_kernels_and_packs_nothing(
    dtype: str, shape: tuple[int, ...]
) -> None:
    model, x = sample_model(dtype).eval(), sample_x(*shape, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        enabled = gt.enable(Kernels())
        compiled = torch.compile(model)
        check(compiled(x), expected)
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert len(enabled.report.taken) == 2


def test_a_batch_of_any_size_is_compiled_once() -> None:
    model = sample_model().eval()
    gt.enable(Kernels(rows=(1, "2..64")), dynamic_rows=[1, "2..64"])
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        compiled(sample_x(5, K))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 3, 17, 64, 65, 100):
                x = sample_x(rows, K)
                check(compiled(x), model(x))
                assert operator_calls(compiled, x).get("gemm_tuner::pack") is None


@pytest.mark.parametrize(
    ("dtype", "dynamic", "beside"),
    [("float32", False, ("mkl",)), ("float32", True, ()), ("bfloat16", False, ())],
)
def test_mkl_runs_where_a_product_of_floats_is_left(
    dtype: str, *, dynamic: bool, beside: tuple[str, ...]
) -> None:
    model = sample_model(dtype).eval()
    source = Kernels(rows=(1, "2..64") if dynamic else None)
    gt.enable(source, dynamic_rows=[1, "2..64"])
    with torch.no_grad():
        torch.compile(model, dynamic=dynamic)(sample_x(5, K, dtype=dtype))
    assert {one.beside for one in source.asked} == {beside}


def test_training_is_compiled_as_before() -> None:
    model, x = sample_model(), sample_x()
    plain = copy.deepcopy(model)
    gt.enable(Kernels())
    torch.compile(model)(x).sum().backward()
    plain(x).sum().backward()
    for name, parameter in model.named_parameters():
        check(parameter.grad, plain.get_parameter(name).grad)


def test_what_is_compiled_for_training_is_neither_taken_nor_tuned() -> None:
    source = Kernels()
    enabled = gt.enable(source, tune="wait")
    torch.compile(sample_model().eval())(sample_x())  # without torch.no_grad, by mistake
    assert source.asked == []
    assert not enabled.report.taken
    assert "for inference, call the model under torch.no_grad()" in str(enabled.report)


def test_a_layer_on_the_fast_path_is_told_and_what_to_do_lets_it_be_taken() -> None:
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.ones(2, 4, 16)
    with torch.no_grad():
        on_it = gt.enable(Kernels())
        torch.compile(encoder)(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            off_it = gt.enable(Kernels())
            torch._dynamo.reset()
            torch.compile(encoder)(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert "torch.backends.mha.set_fastpath_enabled(False)" in str(on_it.report)
    assert not on_it.report.taken
    assert off_it.report.taken


def test_a_source_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, x = sample_model().eval(), sample_x()
    gt.enable(Kernels(error=StoreFailed("the disk is gone")))
    with caplog.at_level(logging.WARNING, "gemm_tuner"), torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert [record for record in caplog.records if "the disk is gone" in record.getMessage()]
    assert len([one for one in caplog.records if one.name.startswith("gemm_tuner")]) == 1


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_erf",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "hardswish": "hardswish",
    "elu": "elu",
    "mish": "mish",
    "leaky_relu": "leaky_relu",
}


class _Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self, function: Any, *, adds: bool) -> None:  # noqa: ANN401 - of PyTorch
        super().__init__()
        self.first, self.second = torch.nn.Linear(K, HIDDEN), torch.nn.Linear(HIDDEN, K)
        self.function, self.adds = function, adds

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        y = self.second(self.function(self.first(x)))
        return y + x if self.adds else y


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_steps_after_a_product_are_recognised(name: str, dtype: str) -> None:
    block = _Block(getattr(torch.nn.functional, name), adds=True).eval()
    block, x = block.to(getattr(torch, dtype)), sample_x(2, 3, K, dtype=dtype)
    source = Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(block)
        check(compiled(x), block(x))
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert [one.epilogue for one in source.asked] == [f"bias+{ACTIVATIONS[name]}", "bias+add"]
    assert [one.name for one in enabled.report] == ["first", "second"]


class _ScaledColumns(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A product, a sum where it `adds`, and a scale and a shift of each column."""

    def __init__(self, *, adds: bool, bias: bool) -> None:
        super().__init__()
        self.linear, self.adds = torch.nn.Linear(K, K, bias=bias), adds
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 2.0, K))
        self.shift = torch.nn.Parameter(torch.linspace(-1.0, 1.0, K))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        y = self.linear(x)
        return (y + x if self.adds else y) * self.scale + self.shift


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("adds", "bias", "epilogue"),
    [
        (True, True, "bias+add+channel_scale+bias"),
        (False, True, "bias+channel_scale+bias"),
        (False, False, "channel_scale+bias"),
    ],
)
def test_a_scale_and_a_shift_of_each_column_are_fused(
    dtype: str, epilogue: str, *, adds: bool, bias: bool
) -> None:
    model = _ScaledColumns(adds=adds, bias=bias).eval().to(getattr(torch, dtype))
    source = Kernels(rows=("1..64",))
    gt.enable(source, dynamic_rows=["1..64"])
    with torch.no_grad():
        compiled = torch.compile(model, dynamic=True)
        for shape in ((4, 3, K), (2, 9, K), (8, 16, K)):  # the last by PyTorch's operators
            x = sample_x(*shape, dtype=dtype)
            check(compiled(x), model(x))
        x = sample_x(5, 7, K, dtype=dtype)
        assert operator_calls(compiled, x) == {"gemm_tuner::fused_linear": 1}
    assert [one.epilogue for one in source.asked] == [epilogue]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)])
def test_dropout_that_drops_nothing_is_no_end(shape: tuple[int, ...]) -> None:
    class Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(K, K), torch.nn.Dropout(0.0)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = torch.relu(self.dropout(self.linear(x)).clone())
            return (self.dropout(y) + x).clone() * 2 + self.dropout(x)

    model, x, source = Block().eval(), sample_x(*shape), Kernels()
    gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(model)
        check(compiled(x), model(x))
        assert operator_calls(compiled, x) == {LINEAR: 1}
    assert [one.epilogue for one in source.asked] == ["bias+relu+add"]


@pytest.mark.usefixtures("loops_by_operators")
def test_of_two_products_the_later_one_adds_the_other() -> None:
    class Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(K, K), torch.nn.Linear(K, K)
            self.third = torch.nn.Linear(K, K)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = self.first(x)
            z = torch.nn.functional.gelu(self.second(torch.relu(x)))
            late = torch.relu(torch.sigmoid(y) + z)
            return self.third(late) + torch.sigmoid(x).cumsum(-1)

    model, x, source = Block().eval(), sample_x(), Kernels()
    gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(model)
        check(compiled(x), model(x))
        assert operator_calls(compiled, x) == {LINEAR: 3}
    epilogues = [one.epilogue for one in source.asked]
    assert epilogues == ["bias+sigmoid", "bias+gelu_erf+add+relu", "bias+add"]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * y.new_ones(6, HIDDEN),
        lambda y: y * torch.linspace(0.5, 2.0, 6)[:, None],
        lambda y: torch.linspace(0.5, 2.0, HIDDEN, dtype=torch.float64) * y,
        lambda y: torch.linspace(0.5, 2.0, HIDDEN) - y,
        lambda y: torch.add(y, torch.linspace(0.5, 2.0, HIDDEN), alpha=2),
        lambda y: torch.linspace(0.5, 2.0, HIDDEN) * y + y,
    ],
)
def test_what_scales_no_columns_is_computed_as_written(function: Any) -> None:  # noqa: ANN401
    model = torch.nn.Sequential(torch.nn.Linear(K, HIDDEN)).eval()
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        x = sample_x()
        compiled = torch.compile(lambda x: function(model(x)))
        torch.testing.assert_close(compiled(x), function(model(x)), rtol=1e-5, atol=1e-5)
        assert operator_calls(compiled, x) == {LINEAR: 1}


def test_gelu_by_tanh_is_another_function() -> None:
    block = _Block(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), adds=False).eval()
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        x = sample_x()
        check(torch.compile(block)(x), block(x))
    assert source.asked[0].epilogue == "bias+gelu_tanh"


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.relu(y) + y.sum(),
        lambda y: torch.nn.functional.gelu(y) * 1.01,
        lambda y: torch.softmax(y, -1),
        lambda y: y.view(-1)[:HIDDEN].relu().expand(6, HIDDEN),
        lambda y: y + y.T.mean(),
        lambda y: torch.clamp(y, -0.3, 0.4),
        lambda y: torch.clamp(y, 0, 200),
        lambda y: torch.nn.functional.leaky_relu(y, 1e-6),
        lambda y: y + y,
        lambda y: y * torch.sigmoid(1.702 * y),
        lambda y: torch.log(torch.relu(y) + 1e-6),
        lambda y: torch.log(torch.clamp_min(y, 1e-6)),
        lambda y: 1 / (torch.sigmoid(y) + 1e-8),
        lambda y: torch.relu(y) * 0.999,
        lambda y: torch.threshold(y, 5e-4, 0),
    ],
)
def test_what_only_looks_like_a_step_is_computed_as_written(function: Any) -> None:  # noqa: ANN401
    block = _Block(function, adds=False).eval()
    gt.enable(Kernels())
    with torch.no_grad():
        x = sample_x()
        compiled = torch.compile(block)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)
        assert operator_calls(compiled, x) == {LINEAR: 2}


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_cast_to_fewer_bits_is_no_step(dtype: Any) -> None:  # noqa: ANN401
    block = _Block(lambda y: torch.relu(y.to(dtype).float()), adds=False).eval()
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        torch.compile(block)(sample_x())
    assert [one.epilogue for one in source.asked] == ["bias", "bias"]


def test_a_result_that_is_read_twice_is_not_fused_away() -> None:
    class Twice(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(K, K)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = self.linear(x)
            return torch.relu(y), y, y + x

    model, x, source = Twice().eval(), sample_x(), Kernels()
    gt.enable(source)
    with torch.no_grad():
        for one, expected in zip(torch.compile(model)(x), model(x), strict=True):
            check(one, expected)
    assert [one.epilogue for one in source.asked] == ["bias"]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(("name", "dtype"), tuple(zip(ACTIVATIONS, cycle(["float32", "bfloat16"]))))
def test_steps_are_fused_for_a_batch_of_any_size(name: str, dtype: str) -> None:
    block = _Block(getattr(torch.nn.functional, name), adds=True).eval()
    block = block.to(getattr(torch, dtype))
    tuned = gt.enable(Kernels(rows=("1..64",)), dynamic_rows=["1..64"])
    with torch.no_grad():
        compiled = torch.compile(block, dynamic=True)
        for shape in ((4, 3, K), (2, 9, K), (8, 16, K)):  # the last by PyTorch's operators
            x = sample_x(*shape, dtype=dtype)
            check(compiled(x), block(x))
        assert operator_calls(compiled, sample_x(5, 7, K, dtype=dtype)) == {LINEAR: 2}
    assert [one.problem.split()[-1] for one in tuned.report] == [
        f"bias+{ACTIVATIONS[name]}",
        "bias+add",
    ]


def test_rows_that_only_the_run_knows_are_left_or_asked_for() -> None:
    class Chosen(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(K, N)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.relu(self.linear(x[(x[:, 0] > 0).nonzero().squeeze(1)]))

    model, x = Chosen().eval(), sample_x()
    for rows, is_taken in (((), False), ((1, "2..64"), True)):
        torch._dynamo.reset()
        tuned = gt.enable(Kernels(rows=rows or (6,)), dynamic_rows=rows)
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(model, fullgraph=True)
            for sign in (1, -1):
                check(compiled(x * sign), model(x * sign))
        assert [one.is_taken for one in tuned.report] == [is_taken]


class _Branch(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(K, N), torch.nn.Linear(K, N)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


class _BranchOfOne(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A branch reads as many arrays as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(sample_x(K, K))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        linear = torch.nn.functional.linear
        return torch.cond(
            x.sum() > 0, lambda x: linear(x, self.w), lambda x: linear(x, -self.w), (x,)
        )


@pytest.mark.parametrize("kind", [_Branch, _BranchOfOne])
@pytest.mark.usefixtures("loops_by_operators")
def test_products_in_branches_are_left(kind: Any) -> None:  # noqa: ANN401 - a class
    model, x = kind().eval(), sample_x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        for sign in (1, -1):
            check(compiled(x * sign), model(x * sign))
            assert not operator_calls(compiled, x * sign)


def test_a_layer_is_tuned_also_where_it_was_asked_for_as_a_part() -> None:
    class Tuning(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            if wanted not in tuned:
                return FoundLayer(kernels=(), reasons=("never tuned.",))
            return super().find(wanted)

        def tune(self, wanted: WantedLayer, budget_s: float) -> None:
            assert budget_s == 3
            if wanted.epilogue == "bias+relu":
                raise StoreFailed("the disk is gone")
            tuned.append(wanted)

    tuned: list[WantedLayer] = []
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.ReLU(), torch.nn.Linear(K, K))
    report = gt.enable(Tuning(), tune="wait", budget_s=3)
    x = sample_x()
    with torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert [one.epilogue for one in tuned] == ["bias"]
    assert [one.is_taken for one in report.report] == [False, True]


@pytest.mark.parametrize("rows", ["1..64", ["many"], [-1]])
def test_rows_that_are_none_are_refused(rows: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInput):
        gt.enable(Kernels(), dynamic_rows=rows)


def test_kernels_that_are_in_nothing_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no kernel is in what was compiled"):
        gt.enable(Kernels()).write_kernels(tmp_path)


@pytest.mark.parametrize("rows", [("1..4",), None])
def test_weights_of_columns_first_are_compiled(rows: tuple[str] | None) -> None:
    w, bias, x = torch.nn.Parameter(sample_x(K, N)), torch.nn.Parameter(sample_x(N)), sample_x()

    class Conv1D(torch.nn.Module):  # type: ignore[misc]  # as in models of transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = w, bias

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.addmm(self.bias, x, self.weight)

    source = Kernels(rows=rows)
    tuned = gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(Conv1D())
        check(compiled(x), x @ w + bias)
        assert operator_calls(compiled, x) == {LINEAR: 1}
    assert [one.is_taken for one in tuned.report] == [True]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    ("compute", "calls"),
    [
        (lambda w, b, x: torch.addmm(b, x, w.T), 1),
        (lambda w, b, x: torch.addmm(b * float("nan"), x, w.T, beta=0), 0),
        (lambda w, b, x: torch.addmm(b, x, w.T, alpha=0.5), 0),
        (lambda w, b, x: torch.addmm(b.expand(6, N), x, w.T), 0),
        (lambda w, b, x: torch.addmm(b[:1], x, w.T), 0),
        (lambda w, b, x: b + x @ w.T, 1),
        (lambda w, b, x: (w @ x.T).T + b, 0),
        (lambda w, b, x: torch.nn.functional.linear(x.T.contiguous().T, w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x.repeat(1, 2)[:, ::2], w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x.expand(2, 6, K), w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x[:0], w, b), 0),
        (lambda w, b, x: torch.nn.functional.linear(x[0], w, b), None),
        (lambda w, b, x: torch.bmm(x.expand(2, 6, K), w.T.expand(2, K, N)) + b, None),
        (lambda w, b, x: torch.nn.functional.linear(x[:, :8], w[:, 8:16], b), None),
        (lambda w, b, x: torch.einsum("mk,nk->mn", x, w) + b, None),
    ],
)
def test_products_are_computed_however_they_are_written(compute: Any, calls: int | None) -> None:  # noqa: ANN401
    """`calls` is None where either way is right."""

    class Written(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = torch.nn.Parameter(sample_x(N, K)), torch.nn.Parameter(sample_x(N))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return compute(self.w, self.b, x)

    model, x = Written(), sample_x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        check(compiled(x), model(x))
        if calls is not None:
            assert operator_calls(compiled, x).get(LINEAR, 0) == calls


def test_autocast_and_inference_mode_are_compiled() -> None:
    block, x = _Block(torch.nn.functional.gelu, adds=False).eval(), sample_x()
    source = Kernels()
    gt.enable(source)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(block)
        check(compiled(x), block(x))
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert {one.dtype for one in source.asked} == {"bf16"}


@pytest.mark.parametrize(
    "compute",
    [
        torch.nn.functional.linear,
        lambda x, w, b: x @ w.T + b,
        lambda x, w, b: torch.addmm(b, x, w.T),
        lambda x, w, b: torch.matmul(x.view(2, 3, K), w.mT) * b,
        lambda x, w, _b: torch.mm(x, w.view(K, N)),
        lambda x, w, b: torch.nn.functional.linear(x[:, :12], w.chunk(2, 1)[1], b),
        lambda x, w, b: torch.conv2d(x.view(2, 3, 1, K).permute(0, 3, 1, 2), w[..., None, None], b),
    ],
)
def test_weights_that_autocast_casts_are_constants(compute: Any) -> None:  # noqa: ANN401
    w, b, x = sample_x(N, K), sample_x(N), sample_x()
    enabled = gt.enable(Kernels())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = passed(enabled, lambda x: compute(x, w, b), x)
        check(graph(x), compute(x, w, b))
    assert [one.problem.split()[0] for one in enabled.report.taken] == ["bf16"]
    assert not enabled.report.left
