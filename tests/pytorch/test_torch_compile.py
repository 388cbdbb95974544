"""Models of PyTorch whose layers call kernels; skipped where PyTorch is not installed."""

import copy
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli.layers import layers_of
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidInput, InvalidSetting, StoreFailed

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels, kernel_of  # noqa: E402 - after PyTorch was found

from gemm_tuner.torch.operators import add_layer  # noqa: E402
from gemm_tuner.torch.sources import FoundLayer, WantedLayer  # noqa: E402

K, HIDDEN, N = 24, 40, 17


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    yield
    gt.disable()
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def _model(dtype: str = "float32", *, bias: bool = True) -> Any:  # noqa: ANN401 - a module
    return torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN, bias=bias), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, N)
    ).to(getattr(torch, dtype))


def _x(*shape: int, dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    return torch.randn(*(shape or (6, K))).to(getattr(torch, dtype))


def _check(y: Any, expected: Any) -> None:  # noqa: ANN401 - tensors
    tolerance = 1e-4 if y.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def _calls(function: Any, *inputs: Any) -> dict[str, int]:  # noqa: ANN401 - a module
    """Return how often each operator of gemm-tuner is called."""
    with torch.profiler.profile() as profile, torch.no_grad():
        function(*inputs)
    return {one.key: one.count for one in profile.key_averages() if "gemm_tuner::" in one.key}


LINEAR, MODULE = "gemm_tuner::linear", "gemm_tuner::linear_or_plain"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_replaced_layers_compute_what_they_did(dtype: str, *, bias: bool) -> None:
    model, x = _model(dtype, bias=bias), _x(dtype=dtype)
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)

    report = gt.replace(model, x, source=Kernels())

    with torch.no_grad():
        _check(model(x), expected)
        assert _calls(model, x) == {LINEAR: 2, MODULE: 2}
    assert [one.is_taken for one in report] == [True, True]
    assert list(model.state_dict()) == names
    gt.restore(model)
    assert not _calls(model, x)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_run_in_the_threads_of_pytorch(threads: int) -> None:
    model = torch.nn.Linear(200, 300)
    x = _x(70, 200)
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        torch.set_num_threads(threads)
        _check(model(x), expected)


def test_inputs_of_any_shape_are_taken() -> None:
    model = _model()
    plain = copy.deepcopy(model)
    gt.replace(model, rows=["1..40"], source=Kernels())
    wide = _x(6, 2 * K)
    inputs = {
        "three dimensions": _x(2, 3, K),
        "one dimension": _x(K),
        "four dimensions": _x(2, 1, 5, K),
        "rows apart": wide[:, :K],
        "every second column": wide[:, ::2],
        "transposed": _x(K, 6).T,
        "the same row": _x(1, K).expand(6, K),
        "no rows": _x(0, K),
        "negated view": torch._neg_view(_x()),
        "one of complex": torch.view_as_real(torch.randn(6, K, dtype=torch.complex64))[..., 1],
        "conjugate's imaginary part": torch.randn(6, K, dtype=torch.complex64).conj().imag,
        "more rows than any kernel is for": _x(41, K),
    }
    with torch.no_grad():
        for name, x in inputs.items():
            y, expected = model(x), plain(x)
            assert y.shape == expected.shape, name
            _check(y, expected)


def test_the_packed_copy_follows_the_weights() -> None:
    model, other, x = _model(), _model(), _x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        model(x)
        model.load_state_dict(other.state_dict())
        _check(model(x), other(x))
        for one in (model, other):
            one[0].weight.mul_(2)
        _check(model(x), other(x))
        for one in (model, other):
            one[0].weight = torch.nn.Parameter(torch.ones(HIDDEN, K))
        _check(model(x), other(x))
        other[0].weight.data = model[0].weight.data = torch.full((HIDDEN, K), 0.5)
        _check(model(x), other(x))
        assert _calls(model, x) == {LINEAR: 2, MODULE: 2}
        for _ in range(3):  # what is freed may come back at the same address
            for one in (model, other):
                one[0].weight.data = torch.zeros(1)
                torch.manual_seed(7)
                one[0].weight.data = _x(HIDDEN, K)
            _check(model(x), other(x))


def test_weights_that_become_another_view_are_not_read_as_before() -> None:
    model, x = torch.nn.Linear(K, K), _x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        model(x)
        model.weight.data = model.weight.data.T
        _check(model(x), x @ model.weight.T + model.bias)


def test_copies_and_files_compute_the_same() -> None:
    model, x = _model(), _x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        expected = model(x)
        copied = copy.deepcopy(model)
        model[0].weight.zero_()
        _check(copied(x), expected)
        assert _calls(copied, x) == {LINEAR: 2, MODULE: 2}
        file = io.BytesIO()
        torch.save(copied, file)
        file.seek(0)
        _check(torch.load(file, weights_only=False)(x), expected)
        _check(copied.double()(x.double()), expected.double())


def test_training_is_as_before() -> None:
    model, x = _model(), _x()
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=Kernels())

    for one in (model, plain):
        one(x).square().sum().backward()

    for name, parameter in model.named_parameters():
        _check(parameter.grad, plain.get_parameter(name).grad)
    recorded = x.clone().requires_grad_()
    assert model.requires_grad_(False)(recorded).requires_grad


def test_what_is_watched_goes_the_ordinary_way() -> None:
    model, x = _model(), _x()
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=Kernels())
    tangent = _x()

    class Marked(torch.Tensor):  # type: ignore[misc]  # without PyTorch, it is Any
        pass

    with torch.no_grad():
        for one in (model, plain):
            one.requires_grad_(False)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            got = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
            _check(got, torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent)
        several = _x(4, 6, K)
        _check(torch.func.vmap(model)(several), torch.func.vmap(plain)(several))
        _value, got = torch.func.jvp(model, (x,), (tangent,))
        _check(got, torch.func.jvp(plain, (x,), (tangent,))[1])
        assert type(model(x.as_subclass(Marked))) is Marked
        traced = torch.jit.trace(model, x)
        _check(traced(2 * x), plain(2 * x))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        meta = copy.deepcopy(model).to("meta")
        assert meta(x.to("meta")).shape == (6, N)


def test_layers_that_cannot_be_replaced_are_left_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    report = gt.replace(encoder, _x(1, 3, 16), source=Kernels())
    assert not report.taken
    assert all("without calling it" in one.reason for one in report)

    model = torch.nn.ModuleList([_model("float64"), _model()])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        report = gt.replace(model, rows=[6], source=Kernels(error=StoreFailed("the disk is gone")))
    assert ["float64" in one.reason for one in report[:2]] == [True, True]
    assert ["the disk is gone" in one.reason for one in report[2:]] == [True, True]
    assert len(caplog.records) == 1
    assert not report.taken


def test_hooks_and_tied_weights_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.Linear(K, K))
    model[1].weight = model[0].weight
    seen: list[Any] = []
    model[0].register_forward_hook(lambda _module, _inputs, y: seen.append(y.shape))
    x = _x()
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        _check(model(x), expected)
    assert model[1].weight is model[0].weight
    assert len(seen) == 3


def test_operators_hold_what_pytorch_asks_of_them() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)])
    ops, w, bias = torch.ops.gemm_tuner, _x(N, K), _x(N)
    packed = ops.pack(w, layer.packed_bytes, layer.number)

    torch.library.opcheck(ops.pack.default, (w, layer.packed_bytes, layer.number))
    torch.library.opcheck(ops.linear.default, (_x(), packed, bias, layer.number))
    _check(
        ops.linear(_x(6, K) * 0 + 1, packed, bias, layer.number),
        (torch.ones(6, K) @ w.T + bias),
    )


def test_packed_weights_may_lie_anywhere() -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk"), 1)])
    ops, x = torch.ops.gemm_tuner, _x()
    for start in (1, 16, 1):  # what is freed may come back at the same address
        w = _x(N, K)
        room = torch.empty(layer.packed_bytes + 64, dtype=torch.uint8)
        packed = room[start : start + layer.packed_bytes]
        packed.copy_(ops.pack(w, layer.packed_bytes, layer.number))
        for _ in range(2):
            _check(ops.linear(x, packed, None, layer.number), x @ w.T)
        del room, packed


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
def test_operators_refuse_what_they_cannot_read(changes: dict[str, Any], reason: str) -> None:
    layer = add_layer([kernel_of(Problem.parse(f"f32 6x{N}x{K} nk bias"), 1)])
    packed = torch.ops.gemm_tuner.pack(_x(N, K), layer.packed_bytes, layer.number)
    arguments = {
        "x": _x(),
        "packed": packed,
        "bias": _x(N),
        "layer": layer.number,
        **changes,
    }

    with pytest.raises((RuntimeError, NotImplementedError), match=reason):
        torch.ops.gemm_tuner.linear(**arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)])
def test_a_compiled_model_calls_kernels_and_packs_nothing(
    dtype: str, shape: tuple[int, ...]
) -> None:
    model, x = _model(dtype).eval(), _x(*shape, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        enabled = gt.enable(Kernels())
        compiled = torch.compile(model)
        _check(compiled(x), expected)
        assert _calls(compiled, x) == {LINEAR: 2}
    assert len(enabled.report.taken) == 2


def test_a_batch_of_any_size_is_compiled_once() -> None:
    model = _model().eval()
    gt.enable(Kernels(rows=(1, "2..64")), dynamic_rows=[1, "2..64"])
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        compiled(_x(5, K))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 3, 17, 64, 65, 100):
                x = _x(rows, K)
                _check(compiled(x), model(x))
                assert _calls(compiled, x).get("gemm_tuner::pack") is None


def test_training_is_compiled_as_before() -> None:
    model, x = _model(), _x()
    plain = copy.deepcopy(model)
    gt.enable(Kernels())
    torch.compile(model)(x).sum().backward()
    plain(x).sum().backward()
    for name, parameter in model.named_parameters():
        _check(parameter.grad, plain.get_parameter(name).grad)


def test_a_product_without_constants_is_left() -> None:
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        x, w = _x(), _x(N, K)
        compiled = torch.compile(torch.nn.functional.linear)
        _check(compiled(x, w), x @ w.T)
    assert not source.asked


def test_a_source_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _model().eval(), _x()
    gt.enable(Kernels(error=StoreFailed("the disk is gone")))
    with caplog.at_level(logging.WARNING, "gemm_tuner"), torch.no_grad():
        _check(torch.compile(model)(x), model(x))
    assert [record for record in caplog.records if "the disk is gone" in record.getMessage()]
    assert len([one for one in caplog.records if one.name.startswith("gemm_tuner")]) == 1


def test_a_replaced_model_can_be_compiled() -> None:
    model, x = _model().eval(), _x()
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        gt.enable(Kernels())
        compiled = torch.compile(model, fullgraph=True)
        _check(compiled(x), expected)
        assert _calls(compiled, x) == {LINEAR: 2}


def test_kernels_come_from_a_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(64, 96), _x(8, 64)
    with torch.no_grad():
        expected = model(x)
        from gemm_tuner.store.database import open_database  # noqa: PLC0415 - made here

        open_database(url).dispose()
        [empty] = gt.replace(model, x, source=url)
        assert not empty.is_taken
        [tuned] = gt.replace(model, x, source=url, tune="wait", budget_s=2)
        _check(model(x), expected)
    assert tuned.is_taken == bool(_calls(model, x))
    assert tuned.reason


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_steps_after_a_product_are_recognised(name: str, dtype: str) -> None:
    block = _Block(getattr(torch.nn.functional, name), adds=True).eval()
    block, x = block.to(getattr(torch, dtype)), _x(2, 3, K, dtype=dtype)
    source = Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(block)
        _check(compiled(x), block(x))
        assert _calls(compiled, x) == {LINEAR: 2}
    assert [one.epilogue for one in source.asked] == [f"bias+{ACTIVATIONS[name]}", "bias+add"]
    assert [one.name for one in enabled.report] == ["first", "second"]


def test_gelu_by_tanh_is_another_function() -> None:
    block = _Block(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), adds=False).eval()
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        x = _x()
        _check(torch.compile(block)(x), block(x))
    assert source.asked[0].epilogue == "bias+gelu_tanh"


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
        x = _x()
        compiled = torch.compile(block)
        torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)
        assert _calls(compiled, x) == {LINEAR: 2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_cast_to_fewer_bits_is_no_step(dtype: Any) -> None:  # noqa: ANN401
    block = _Block(lambda y: torch.relu(y.to(dtype).float()), adds=False).eval()
    source = Kernels()
    gt.enable(source)
    with torch.no_grad():
        torch.compile(block)(_x())
    assert [one.epilogue for one in source.asked] == ["bias", "bias"]


def test_a_result_that_is_read_twice_is_not_fused_away() -> None:
    class Twice(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(K, K)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = self.linear(x)
            return torch.relu(y), y, y + x

    model, x, source = Twice().eval(), _x(), Kernels()
    gt.enable(source)
    with torch.no_grad():
        for one, expected in zip(torch.compile(model)(x), model(x), strict=True):
            _check(one, expected)
    assert [one.epilogue for one in source.asked] == ["bias"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_steps_are_fused_for_a_batch_of_any_size(name: str, dtype: str) -> None:
    block = _Block(getattr(torch.nn.functional, name), adds=True).eval()
    block = block.to(getattr(torch, dtype))
    tuned = gt.enable(Kernels(rows=("1..64",)), dynamic_rows=["1..64"])
    with torch.no_grad():
        compiled = torch.compile(block, dynamic=True)
        for shape in ((4, 3, K), (2, 9, K), (8, 16, K)):  # the last by PyTorch's operators
            x = _x(*shape, dtype=dtype)
            _check(compiled(x), block(x))
        assert _calls(compiled, _x(5, 7, K, dtype=dtype)) == {LINEAR: 2}
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

    model, x = Chosen().eval(), _x()
    for rows, is_taken in (((), False), ((1, "2..64"), True)):
        torch._dynamo.reset()
        tuned = gt.enable(Kernels(rows=rows or (6,)), dynamic_rows=rows)
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(model, fullgraph=True)
            for sign in (1, -1):
                _check(compiled(x * sign), model(x * sign))
        assert [one.is_taken for one in tuned.report] == [is_taken]


def test_products_in_branches_are_left() -> None:
    class Branch(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(K, N), torch.nn.Linear(K, N)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.cond(x.sum() > 0, self.one, self.other, (x,))

    model, x = Branch().eval(), _x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        for sign in (1, -1):
            _check(compiled(x * sign), model(x * sign))
        assert not _calls(compiled, x)


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
    x = _x()
    with torch.no_grad():
        _check(torch.compile(model)(x), model(x))
    assert [one.epilogue for one in tuned] == ["bias"]
    assert [one.is_taken for one in report.report] == [False, True]


def test_one_layer_has_one_order_of_its_weights() -> None:
    kernels = [kernel_of(Problem.parse(f"f32 {m}x{N}x{K} nk"), 1) for m in (1, 6, 40)]

    first, second = add_layer(kernels), add_layer(kernels[::-1])

    assert first == second


@pytest.mark.parametrize("rows", ["1..64", ["many"], [-1]])
def test_rows_that_are_none_are_refused(rows: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInput):
        gt.enable(Kernels(), dynamic_rows=rows)


def test_kernels_that_are_in_nothing_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no kernel is in what was compiled"):
        gt.enable(Kernels()).write_kernels(tmp_path)


def test_modules_of_any_kind_are_collected() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(N), torch.nn.Linear(N, K))

    with torch.inference_mode():
        found = gt.collect(lazy, _x())

    assert {(one.sizes, one.weights) for one in found} == {
        (f"6x{N}x{K}", ("0.weight",)),
        (f"6x{K}x{N}", ("1.weight",)),
    }


def test_products_are_collected_with_their_weights(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(K, N), torch.nn.Linear(K, N, bias=False)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return self.first(x) @ self.second(x).transpose(-1, -2)

    inputs = [_x(4, 6, K), _x(4, 6, K), (_x(1, 1, K),)]
    found = gt.collect(Attention(), inputs, repeats=2)
    facts = {(one.sizes, one.has_bias, one.weights): one.calls for one in found}

    assert facts == {
        (f"24x{N}x{K}", True, ("first.weight",)): 2,
        (f"24x{N}x{K}", False, ("second.weight",)): 2,
        (f"1x{N}x{K}", True, ("first.weight",)): 1,
        (f"1x{N}x{K}", False, ("second.weight",)): 1,
        (f"4 of 6x6x{N}", False, ()): 2,
        (f"1x1x{N}", False, ()): 1,
    }
    assert 0 < sum(one.share for one in found) < 1
    assert "first.weight" in str(found)
    assert found.write_layers(tmp_path / "layers.csv") == 4
    layers = layers_of(
        m=None,
        n=None,
        k=None,
        shapes=tmp_path / "layers.csv",
        dtype="f32",
        epilogue="none",
        w_layout="nk",
    )
    assert {(one.problem.n, one.problem.k) for one in layers} == {(N, K)}
    assert found.write_layers(tmp_path / "layers.csv", dtype="bf16") == 0


@pytest.mark.parametrize("rows", [("1..4",), None])
def test_weights_of_columns_first_are_compiled(rows: tuple[str] | None) -> None:
    w, bias, x = torch.nn.Parameter(_x(K, N)), torch.nn.Parameter(_x(N)), _x()

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
        _check(compiled(x), x @ w + bias)
        assert _calls(compiled, x) == {LINEAR: 1}
    assert [one.is_taken for one in tuned.report] == [True]


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
            self.w, self.b = torch.nn.Parameter(_x(N, K)), torch.nn.Parameter(_x(N))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return compute(self.w, self.b, x)

    model, x = Written(), _x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        _check(compiled(x), model(x))
        if calls is not None:
            assert _calls(compiled, x).get(LINEAR, 0) == calls


def test_autocast_and_inference_mode_are_compiled() -> None:
    block, x = _Block(torch.nn.functional.gelu, adds=False).eval(), _x()
    source = Kernels()
    gt.enable(source)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(block)
        _check(compiled(x), block(x))
        assert _calls(compiled, x) == {LINEAR: 2}
    assert {one.dtype for one in source.asked} == {"bf16"}
