"""Steps after a product that torch.compile fuses; skipped where PyTorch is not installed."""

from itertools import cycle
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    HIDDEN,
    LINEAR,
    K,
    check,
    operator_calls,
    sample_x,
)

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
        lambda y: torch.log(torch.sigmoid(torch.clamp(200 * y, -50, 50))),
        lambda y: torch.log(torch.sigmoid(torch.clamp(y, -50, 50))),
        lambda y: 1 / torch.sigmoid(torch.clamp_min(y, -40)),
        lambda y: torch.log(torch.sigmoid(torch.relu(y + 50) - 50)),
        lambda y: torch.relu(y * 1e10 / 1e10),
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
