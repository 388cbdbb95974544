"""Linear layers of PyTorch that call kernels in eager mode; skipped where it is not installed."""

import copy
import io
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import make_artifact, make_disturbed_trial

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError, InvalidSetting, StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    HIDDEN,
    LINEAR,
    MODULE,
    K,
    N,
    check,
    operator_calls,
    sample_model,
    sample_x,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_replaced_layers_compute_what_they_did(dtype: str, *, bias: bool) -> None:
    model, x = sample_model(dtype, bias=bias), sample_x(dtype=dtype)
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)

    report = gt.replace(model, x, source=Kernels())

    with torch.no_grad():
        check(model(x), expected)
        assert operator_calls(model, x) == {LINEAR: 2, MODULE: 2}
    assert [one.is_taken for one in report] == [True, True]
    assert list(model.state_dict()) == names
    gt.restore(model)
    assert not operator_calls(model, x)
    assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_same_bits_in_a_batch_of_one_and_of_seven(dtype: str) -> None:
    model, source = torch.nn.Linear(300, 200).to(getattr(torch, dtype)), Kernels()
    x = sample_x(7, 300, dtype=dtype)

    report = gt.replace(model, rows=[1, 7], source=source, reduction="fixed")

    assert [one.is_taken for one in report] == [True]
    assert [one.reduction for one in source.asked] == ["fixed"]
    with torch.no_grad():
        whole = model(x)
        alone = [model(row) for row in x]
        assert torch.equal(whole, torch.stack(alone))
        assert torch.equal(whole, torch.vmap(model)(x))
        check(whole, torch.nn.functional.linear(x, model.weight, model.bias))
        for rows in (3, 8):  # PyTorch's own would have other bits
            with pytest.raises(InvalidSetting, match=f"no kernel computes {rows} rows of a layer"):
                model(sample_x(rows, 300, dtype=dtype))
        assert model(sample_x(0, 300, dtype=dtype)).shape == (0, 200)


@pytest.mark.proof
def test_a_compiled_model_keeps_the_bits_of_layers_with_a_fixed_order() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.ReLU()), sample_x(7, 300)
    gt.replace(model, rows=["1..7"], source=Kernels(), reduction="fixed")
    calls: list[object] = []
    model[0].register_forward_hook(lambda *_arguments: calls.append(model))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        whole = model(x)
        assert torch.equal(compiled(x), whole)
        assert torch.equal(compiled(x[2:3]), whole[2:3])
        assert len(calls) == 3
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):  # rather than other bits
            torch.compile(model, backend="eager", fullgraph=True)(x)
    assert compiled(x).requires_grad  # what is recorded takes the ordinary way


def test_what_pytorch_would_compute_in_its_own_order_is_refused() -> None:
    layer, x = torch.nn.Linear(K, N), sample_x()
    gt.replace(layer, rows=["1..6"], source=Kernels(), reduction="fixed")
    without_bias, transposed, computed = (copy.deepcopy(layer) for _ in range(3))
    without_bias.bias = None
    transposed.weight = torch.nn.Parameter(layer.weight.detach().T.contiguous().T)
    torch.nn.utils.parametrizations.weight_norm(computed)
    calls = {
        "no bias": (without_bias, x),
        "weights that are computed": (computed, x),
        "a view that is negated": (layer, torch._neg_view(x)),
        "a parameter": (layer, torch.nn.Parameter(x, requires_grad=False)),
    }
    with torch.no_grad():
        for name, (model, given) in calls.items():
            with pytest.raises(ValueError, match=r"no kernel .* 'fixed'"):
                pytest.fail(f"{name}: {model(given).shape}")
        assert torch.equal(transposed(x), layer(x))  # a kernel reads what was packed
    for model, given in (*calls.values(), (layer, x.clone().requires_grad_())):
        assert model(given).requires_grad  # what is recorded takes the ordinary way


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("2..16", r"rows is '2..16'; give a list, \['2..16'\]"),
        (8, r"rows is 8; give a list, \[8\]"),
        ([], "rows is empty"),
        ([1, "16..2"], "m = 16..2 is an empty range"),
        ([1.5], "m = '1.5' is not understood"),
    ],
)
def test_rows_that_are_none_are_refused(rows: object, told: str) -> None:
    with pytest.raises(GemmTunerError, match=told):
        gt.replace(sample_model(), rows=rows, source=Kernels())


def test_a_reduction_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="reduction = 'some' is not known"):
        gt.replace(sample_model(), rows=[1], source=Kernels(), reduction="some")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_run_in_the_threads_of_pytorch(threads: int) -> None:
    model = torch.nn.Linear(200, 300)
    x = sample_x(70, 200)
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        torch.set_num_threads(threads)
        check(model(x), expected)


def test_inputs_of_any_shape_are_taken() -> None:
    model = sample_model()
    plain = copy.deepcopy(model)
    gt.replace(model, rows=["1..40"], source=Kernels())
    wide = sample_x(6, 2 * K)
    inputs = {
        "three dimensions": sample_x(2, 3, K),
        "one dimension": sample_x(K),
        "four dimensions": sample_x(2, 1, 5, K),
        "rows apart": wide[:, :K],
        "every second column": wide[:, ::2],
        "transposed": sample_x(K, 6).T,
        "the same row": sample_x(1, K).expand(6, K),
        "no rows": sample_x(0, K),
        "negated view": torch._neg_view(sample_x()),
        "one of complex": torch.view_as_real(torch.randn(6, K, dtype=torch.complex64))[..., 1],
        "conjugate's imaginary part": torch.randn(6, K, dtype=torch.complex64).conj().imag,
        "more rows than any kernel is for": sample_x(41, K),
    }
    with torch.no_grad():
        for name, x in inputs.items():
            y, expected = model(x), plain(x)
            assert y.shape == expected.shape, name
            check(y, expected)


def test_where_no_kernel_is_for_the_operator_is_not_called() -> None:
    model = torch.nn.Linear(K, N)
    gt.replace(model, rows=["4..8", 16], source=Kernels())
    for one in (model, copy.deepcopy(model)):
        for rows in (0, 3, 17):
            assert not operator_calls(one, sample_x(rows, K))
        assert operator_calls(one, sample_x(4, K)) == {"gemm_tuner::pack": 1, LINEAR: 1, MODULE: 1}
        for rows in (4, 8, 16):
            assert operator_calls(one, sample_x(rows, K)) == {LINEAR: 1, MODULE: 1}
        assert operator_calls(one, sample_x(12, K)) == {MODULE: 1}
        with torch.autocast("cpu", torch.bfloat16):
            assert not operator_calls(one, sample_x(4, K))


def test_the_packed_copy_follows_the_weights() -> None:
    model, other, x = sample_model(), sample_model(), sample_x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        model(x)
        model.load_state_dict(other.state_dict())
        check(model(x), other(x))
        for one in (model, other):
            one[0].weight.mul_(2)
        check(model(x), other(x))
        for one in (model, other):
            one[0].weight = torch.nn.Parameter(torch.ones(HIDDEN, K))
        check(model(x), other(x))
        other[0].weight.data = model[0].weight.data = torch.full((HIDDEN, K), 0.5)
        check(model(x), other(x))
        assert operator_calls(model, x) == {LINEAR: 2, MODULE: 2}
        for _ in range(3):  # what is freed may come back at the same address
            for one in (model, other):
                one[0].weight.data = torch.zeros(1)
                torch.manual_seed(7)
                one[0].weight.data = sample_x(HIDDEN, K)
            check(model(x), other(x))


def test_weights_that_become_another_view_are_not_read_as_before() -> None:
    model, x = torch.nn.Linear(K, K), sample_x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        model(x)
        for _ in range(2):  # to other strides of the same memory, and back
            model.weight.data = model.weight.data.T
            check(model(x), x @ model.weight.T + model.bias)


def test_copies_and_files_compute_the_same() -> None:
    model, x = sample_model(), sample_x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        expected = model(x)
        copied = copy.deepcopy(model)
        model[0].weight.zero_()
        check(copied(x), expected)
        assert operator_calls(copied, x) == {LINEAR: 2, MODULE: 2}
        file = io.BytesIO()
        torch.save(copied, file)
        file.seek(0)
        check(torch.load(file, weights_only=False)(x), expected)
        check(copied.double()(x.double()), expected.double())


def test_training_is_as_before() -> None:
    model, x = sample_model(), sample_x()
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=Kernels())

    for one in (model, plain):
        one(x).square().sum().backward()

    for name, parameter in model.named_parameters():
        check(parameter.grad, plain.get_parameter(name).grad)
    recorded = x.clone().requires_grad_()
    assert model.requires_grad_(False)(recorded).requires_grad


def test_what_is_watched_goes_the_ordinary_way() -> None:
    model, x = sample_model(), sample_x()
    plain = copy.deepcopy(model)
    gt.replace(model, x, source=Kernels())
    tangent = sample_x()

    class Marked(torch.Tensor):  # type: ignore[misc]  # without PyTorch, it is Any
        pass

    with torch.no_grad():
        for one in (model, plain):
            one.requires_grad_(False)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            got = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
            check(got, torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent)
        several = sample_x(4, 6, K)
        check(torch.func.vmap(model)(several), torch.func.vmap(plain)(several))
        assert not operator_calls(torch.func.vmap(model), several)
        _value, got = torch.func.jvp(model, (x,), (tangent,))
        check(got, torch.func.jvp(plain, (x,), (tangent,))[1])
        assert type(model(x.as_subclass(Marked))) is Marked
        traced = torch.jit.trace(model, x)
        check(traced(2 * x), plain(2 * x))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        meta = copy.deepcopy(model).to("meta")
        assert meta(x.to("meta")).shape == (6, N)


def test_layers_that_cannot_be_replaced_are_left_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    report = gt.replace(encoder, sample_x(1, 3, 16), source=Kernels())
    assert not report.taken
    assert all("without calling it" in one.reason for one in report)

    model = torch.nn.ModuleList([sample_model("float64"), sample_model()])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        report = gt.replace(model, rows=[6], source=Kernels(error=StoreFailed("the disk is gone")))
    assert ["float64" in one.reason for one in report[:2]] == [True, True]
    assert ["the disk is gone" in one.reason for one in report[2:]] == [True, True]
    assert len(caplog.records) == 1
    assert not report.taken


def test_a_bias_of_another_shape_goes_the_ordinary_way() -> None:
    layer, x = torch.nn.Linear(K, HIDDEN).eval(), sample_x(4, K)
    assert gt.replace(layer, x, source=Kernels()).taken
    layer.bias = torch.nn.Parameter(torch.randn(1))

    with torch.no_grad():
        check(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_hooks_and_tied_weights_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.Linear(K, K))
    model[1].weight = model[0].weight
    seen: list[Any] = []
    model[0].register_forward_hook(lambda _module, _inputs, y: seen.append(y.shape))
    x = sample_x()
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        check(model(x), expected)
    assert model[1].weight is model[0].weight
    assert len(seen) == 3


def test_a_replaced_model_can_be_compiled() -> None:
    model, x = sample_model().eval(), sample_x()
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        gt.enable(Kernels())
        compiled = torch.compile(model, fullgraph=True)
        check(compiled(x), expected)
        assert operator_calls(compiled, x) == {LINEAR: 2}


def test_kernels_come_from_a_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(64, 96), sample_x(8, 64)
    with torch.no_grad():
        expected = model(x)
        open_database(url).dispose()
        [empty] = gt.replace(model, x, source=url)
        assert not empty.is_taken
        [tuned] = gt.replace(model, x, source=url, tune="wait", budget_s=2)
        check(model(x), expected)
    assert tuned.is_taken == bool(operator_calls(model, x))
    assert tuned.reason


def test_a_report_tells_what_was_timed_where_no_kernel_is_taken(tmp_path: Path) -> None:
    """Of weights from memory a sweep ended disturbed; nothing was timed of those in a cache."""
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    torch.set_num_threads(1)
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    problem = Problem.parse("f32 8x96x64 nk bias")
    disturbed = replace(
        make_disturbed_trial(),
        problem=problem,
        cpu=detect_cpu(),
        context=cold,
        candidate=Candidate.parse("scalar_f32_2x4 mc8_nc96_kc64 jc_ic_jr_ir"),
        artifact=make_artifact(required_isa=frozenset()),
    )
    Repository(open_database(url)).add_trial(disturbed)

    [left] = gt.replace(torch.nn.Linear(64, 96), sample_x(8, 64), source=url)

    assert not left.is_taken
    assert "nothing was tuned" not in left.reason
    assert "disturbed and decides nothing" in left.reason
