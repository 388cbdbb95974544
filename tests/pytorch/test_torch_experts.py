"""Experts, whose weights are one array for all: products of groups of rows."""

import copy
import pickle
from contextlib import suppress
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import check, operator_calls  # noqa: E402

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.layers.wanted import WantedGroups  # noqa: E402
from gemm_tuner.torch.operators import add_layer  # noqa: E402

HIDDEN, WITHIN, EXPERTS = 64, 32, 4
ENDS = [2, 2, 6, 7]
GROUPED = "gemm_tuner::grouped_or_plain"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the norm


class Experts(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """As `transformers` computes them, of rows that are sorted by their expert."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        sizes = [(2 * WITHIN, HIDDEN), (HIDDEN, WITHIN)]
        shapes = [(k, n) if is_transposed else (n, k) for n, k in sizes]
        self.gate_up, self.down = (
            torch.nn.Parameter(torch.randn(EXPERTS, *shape) / 8) for shape in shapes
        )
        self.is_transposed = is_transposed

    def multiplied(self, x: Any, w: Any, ends: Any) -> Any:  # noqa: ANN401 - tensors
        w = w if self.is_transposed else w.transpose(1, 2)
        return torch.nn.functional.grouped_mm(x, w, offs=ends)

    def forward(self, x: Any, ends: Any) -> Any:  # noqa: ANN401 - tensors
        gate, up = self.multiplied(x, self.gate_up, ends).chunk(2, -1)
        return self.multiplied(gate.relu() * up, self.down, ends)


class Model(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A linear layer, positions, and a convolution with weights of three dimensions before them."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.places = torch.nn.Parameter(torch.randn(1, 7, HIDDEN))
        self.mixed = torch.nn.Conv1d(7, 7, 3, padding=1)
        self.experts = Experts(is_transposed=is_transposed)

    def forward(self, x: Any, ends: Any) -> Any:  # noqa: ANN401 - tensors
        return self.experts(self.mixed(self.first(x) + self.places[0]), ends)


def _sample(
    dtype: str = "bfloat16", *, is_transposed: bool = False, ends: list[int] = ENDS
) -> tuple[Any, Any, Any]:
    """Return a model, x of seven rows, and where the rows of each expert end."""
    torch.manual_seed(0)
    type_ = getattr(torch, dtype)
    model = Model(is_transposed=is_transposed).eval().to(type_)
    return model, torch.randn(7, HIDDEN, dtype=type_), torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_call_kernels(dtype: str, *, is_transposed: bool) -> None:
    model, x, ends = _sample(dtype, is_transposed=is_transposed)
    with torch.no_grad():
        expected = model(x, ends)
        report = gt.replace(model, (x, ends), source=Kernels())
        check(model(x, ends), expected)
        assert operator_calls(model, x, ends)[GROUPED] == 2
        gt.restore(model)
        assert torch.equal(model(x, ends), expected)
    assert [one.name for one in report.taken] == ["first", "experts", "experts"]
    assert not report.left
    layout = "kn" if is_transposed else "nk"
    type_ = "f32" if dtype == "float32" else "bf16"
    assert [one.problem for one in report.taken][1:] == [
        f"3 of matmul {type_} 1,2..4x{2 * WITHIN}x{HIDDEN} {layout} none",
        f"3 of matmul {type_} 1,2..4x{HIDDEN}x{WITHIN} {layout} none",
    ]


@pytest.mark.parametrize(
    "ends",
    [[0, 0, 0, 7], [7, 7, 7, 7], [1, 2, 3, 4], [0, 0, 0, 0], [2, 2, 6, 6], [1, 6, 6, 7]],
    ids=str,
)
def test_groups_have_any_number_of_rows(ends: list[int]) -> None:
    """Seven are more than the kernels take; the rows behind the last group are nobody's."""
    model, x, first_ends = _sample("float32")
    with torch.no_grad():
        gt.replace(model, (x, first_ends), source=Kernels())
        given = torch.tensor(ends, dtype=torch.int32)
        hidden = torch.randn(7, HIDDEN)
        y = model.experts(hidden, given)
        weights = model.experts.gate_up, model.experts.down
        for row in range(7):
            group = next((one for one, end in enumerate(ends) if row < end), None)
            if group is None:
                assert not y[row].any()
                continue
            gate, up = (weights[0][group] @ hidden[row]).chunk(2)
            check(y[row], weights[1][group] @ (gate.relu() * up))


@pytest.mark.parametrize(
    "ends", [[2, 1, 6, 7], [-1, 2, 6, 7], [2, 2, 6, 8]], ids=["falling", "negative", "beyond"]
)
def test_ends_that_are_none_are_left_to_pytorch(ends: list[int]) -> None:
    model, x, first_ends = _sample("float32")
    with torch.no_grad():
        gt.replace(model, (x, first_ends), source=Kernels())
        given = torch.tensor(ends, dtype=torch.int32)
        w = model.experts.gate_up.transpose(1, 2)
        numbers = model.experts.forward._numbers
        calls = _plain_calls(lambda: torch.ops.gemm_tuner.grouped_or_plain(x, w, given, numbers))
    assert calls == 1


def _plain_calls(call: Any) -> int:  # noqa: ANN401 - a function
    """Return how often PyTorch's own operator is called, whatever it makes of its arguments."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, suppress(RuntimeError):
        call()
    return sum(one.count for one in profile.key_averages() if one.key == "aten::_grouped_mm")


def test_weights_that_change_are_read() -> None:
    model, x, ends = _sample("float32")
    with torch.no_grad():
        gt.replace(model, (x, ends), source=Kernels())
        model(x, ends)
        model.experts.down.data.mul_(2)
        tuned = model(x, ends)
        gt.restore(model)
        check(tuned, model(x, ends))


def test_copies_and_pickles_of_experts_compute_alike() -> None:
    model, x, ends = _sample("float32")
    with torch.no_grad():
        expected = model(x, ends)
        gt.replace(model, (x, ends), source=Kernels())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            check(other(x, ends), expected)


def test_experts_are_trained_as_without_kernels() -> None:
    model, x, ends = _sample("bfloat16")
    plain = copy.deepcopy(model)
    gt.replace(model, (x, ends), source=Kernels())
    for one in (model, plain):
        one(x, ends).float().sum().backward()
    check(model.experts.down.grad, plain.experts.down.grad)


def test_autocast_is_left_to_pytorch() -> None:
    model, x, ends = _sample("float32")
    with torch.no_grad():
        gt.replace(model, (x, ends), source=Kernels())
        w = model.experts.gate_up.transpose(1, 2).bfloat16()
        with torch.autocast("cpu"):
            y = model.experts.multiplied(x.bfloat16(), model.experts.gate_up.bfloat16(), ends)
        assert y.dtype is torch.bfloat16
        check(y, torch.nn.functional.grouped_mm(x.bfloat16(), w, offs=ends))


@pytest.mark.parametrize("why", ["fixed", "rows", "another function"])
def test_experts_that_are_left_have_a_line(why: str) -> None:
    model, x, ends = _sample("float32")
    if why == "another function":
        model.experts.multiplied = lambda x, w, _ends: x @ w[0].mT
    given: dict[str, dict[str, Any]] = {
        "fixed": {"example_inputs": (x, ends), "reduction": "fixed"},
        "rows": {"rows": [7]},
        "another function": {"example_inputs": (x, ends)},
    }
    report = gt.replace(model, source=Kernels(), **given[why])
    assert [one.name for one in report.taken] == ["first"]
    [left] = report.left
    assert left.text == (
        "experts: left: Experts: it multiplies by stacks of matrices, as experts do, and no call "
        "of torch.nn.functional.grouped_mm was seen, which kernels take (gate_up, down)"
    )


def test_experts_are_tuned_inside_the_model() -> None:
    model, x, ends = _sample("float32")
    with torch.no_grad():
        expected = model(x, ends)
        gain = gt.tune_model(model, (x, ends), source=Kernels(), budget_s=0)
        check(model(x, ends), expected)
    assert any("matmul f32" in one.problem for one in gain.layers)


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_compiled_experts_call_kernels(options: dict[str, bool], *, is_transposed: bool) -> None:
    model, x, ends = _sample(is_transposed=is_transposed)
    others = torch.tensor([0, 0, 6, 6], dtype=torch.int32)
    with torch.no_grad():
        expected = [model(x, one) for one in (ends, others)]
        enabled = gt.enable(Kernels())
        compiled = torch.compile(model, options=options)
        check(compiled(x, ends), expected[0])
        check(compiled(x, others)[:6], expected[1][:6])  # the last is of no group
    assert not enabled.report.left
    layout = "kn" if is_transposed else "nk"
    assert [one.problem for one in enabled.report.taken][1:] == [
        f"matmul bf16 1,2..4x{2 * WITHIN}x{HIDDEN} {layout} none",
        f"matmul bf16 1,2..4x{HIDDEN}x{WITHIN} {layout} none",
    ]


def test_compiled_experts_of_any_number_of_tokens_are_asked_for() -> None:
    model, _x, _ends = _sample()
    source = Kernels()
    with torch.no_grad():
        enabled = gt.enable(source, dynamic_rows=["1..8"])
        layer = torch.compile(model.experts)
        for rows in (7, 9):
            given = torch.randn(rows, HIDDEN).bfloat16()
            torch._dynamo.mark_dynamic(given, 0)
            last = torch.tensor([2, 2, 6, rows], dtype=torch.int32)
            check(layer(given, last), model.experts(given, last))
    assert {one.rows for one in source.asked} == {("1..8",)}
    assert len(enabled.report.taken) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": (7, HIDDEN + 1)}, "its last dimension must be 64"),
        ({"x": (1, 7, HIDDEN)}, "a matrix for each group"),
        ({"w": (EXPERTS, HIDDEN, 2 * WITHIN + 1)}, "its last two dimensions must be"),
    ],
    ids=str,
)
def test_the_operator_refuses_what_are_no_groups(change: dict[str, Any], told: str) -> None:
    wanted = WantedGroups(
        n=2 * WITHIN,
        k=HIDDEN,
        rows=("1..8",),
        dtype="f32",
        epilogue="none",
        threads=1,
        w_layout="kn",
    )
    layer = add_layer(Kernels().find(wanted).kernels)
    x = torch.randn(*change.get("x", (7, HIDDEN)))
    w = torch.randn(*change.get("w", (EXPERTS, HIDDEN, 2 * WITHIN)))
    ends = torch.tensor(ENDS)
    with pytest.raises(RuntimeError, match=told):
        torch.ops.gemm_tuner.grouped_matmul(x, w, ends, layer.number)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, on transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_transformers_are_taken(dtype: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 99}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval().to(getattr(torch, dtype))
    prompt, other = torch.arange(3, 20)[None], torch.arange(5, 36).reshape(1, -1)
    with torch.no_grad():
        expected = [model(one).logits for one in (prompt, other)]
        report = gt.replace(model, prompt, source=Kernels())
        for one, y in zip((prompt, other), expected, strict=True):
            assert float((model(one).logits - y).norm() / y.norm()) < TOLERANCE[dtype]
        gt.restore(model)
        enabled = gt.enable(Kernels())
        y = torch.compile(model)(prompt).logits
        assert float((y - expected[0]).norm() / expected[0].norm()) < TOLERANCE[dtype]
    for one in (report, enabled.report):
        taken = [layer.name for layer in one.taken]
        assert taken.count("model.layers.0.mlp.experts") == 2, one
        assert not one.left, one


def test_rows_are_those_of_linear_layers_beside_experts() -> None:
    model, x, ends = _sample("float32")
    report = gt.replace(model, (x, ends), rows=[1, "2..16"], source=Kernels())
    assert [(one.name, one.rows) for one in report.taken] == [
        ("first", (1, "2..16")),
        ("experts", (1, "2..4")),
        ("experts", (1, "2..4")),
    ]


@pytest.mark.parametrize(
    "ends", [[2, 1, 6, 7], [-1, 2, 6, 7], [2, 2, 6, 9]], ids=["falling", "negative", "beyond"]
)
def test_compiled_experts_make_of_such_ends_what_pytorch_does(ends: list[int]) -> None:
    model, x, _ends = _sample()
    given = torch.tensor(ends, dtype=torch.int32)
    with torch.no_grad():
        whole = model.experts(x, given)
        gt.enable(Kernels())
        y = torch.compile(model.experts)(x, given)
        rows = [row for row in range(7) if ends[0] <= row < min(ends[-1], 7)]
        check(y[rows[:1]], whole[rows[:1]])


class _ByNames(Experts):
    """Calls the function below `grouped_mm` by the names of its arguments."""

    def multiplied(self, x: Any, w: Any, ends: Any) -> Any:  # noqa: ANN401 - tensors
        w = w if self.is_transposed else w.transpose(1, 2)
        return torch._grouped_mm(input=x, mat2=w, offs=ends)


def test_arguments_may_have_names() -> None:
    model, x, ends = _sample("float32")
    model.experts.__class__ = _ByNames
    with torch.no_grad():
        expected = model(x, ends)
        report = gt.replace(model, (x, ends), source=Kernels())
        assert operator_calls(model, x, ends)[GROUPED] == 2
        check(model(x, ends), expected)
    assert not report.left


def _on_meta(model: Any, x: Any, ends: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401
    return model.experts.to("meta"), (x.to("meta"), ends.to("meta"))


def _in_vmap(model: Any, x: Any, ends: Any) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401
    class Mapped(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.w = model.experts.gate_up

        def forward(self, x: Any, ends: Any) -> Any:  # noqa: ANN401 - tensors
            grouped = torch.nn.functional.grouped_mm
            w = self.w.transpose(1, 2)
            return torch.vmap(lambda x, ends: grouped(x, w, offs=ends))(x, ends)

    return Mapped(), (x.expand(2, 7, HIDDEN), ends.expand(2, EXPERTS))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of vmap, which has no rule for groups
@pytest.mark.parametrize("make", [_on_meta, _in_vmap])
def test_ends_without_numbers_are_no_error(make: Any) -> None:  # noqa: ANN401 - a function
    with torch.no_grad():
        model, inputs = make(*_sample())
        expected = model(*inputs)
        report = gt.replace(model, inputs, source=Kernels())
        assert model(*inputs).shape == expected.shape
    assert not report.taken


def test_experts_are_traced_as_without_kernels() -> None:
    model, x, ends = _sample("float32")
    with torch.no_grad():
        expected = model(x, ends)
        gt.replace(model, (x, ends), source=Kernels())
        traced = torch.jit.trace(model, (x, ends), check_trace=False)
        check(traced(x, ends), expected)
        with pytest.raises(InvalidSetting, match=r"torch\.jit\.script cannot compile"):
            torch.jit.script(model)
