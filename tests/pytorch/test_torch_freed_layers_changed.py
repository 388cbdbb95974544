"""Layers that hold their weights in packed form alone, and are changed by others meanwhile."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.nn.utils.weight_norm
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch.nn.utils import parametrize, prune  # noqa: E402 - after PyTorch was found
from torch_kernels import Kernels  # noqa: E402
from torch_samples import HIDDEN, K, check, sample_model, sample_x  # noqa: E402

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.torch.eager import packed_linear  # noqa: E402
from gemm_tuner.torch.eager.packed_linear import PackedLinear  # noqa: E402
from gemm_tuner.torch.eager.tuned_linear import TunedLinear  # noqa: E402


@pytest.fixture(autouse=True)
def _warned_anew() -> None:
    packed_linear._warn_of_reading.cache_clear()


def freed_model(*, bias: bool = True, reduction: str = "any") -> tuple[Any, Any]:
    """Return a model without its weights, and what it was."""
    model = sample_model(bias=bias)
    plain = copy.deepcopy(model)
    gt.replace(model, rows=[1, "4..8"], source=Kernels(), reduction=reduction)
    gt.free_weights(model)
    assert type(model[0]) is PackedLinear
    return model, plain


def set_bias(bias: Any) -> Callable[[Any], None]:  # noqa: ANN401 - a tensor
    """Return what gives a layer a bias."""
    return lambda layer: setattr(layer, "bias", bias and torch.nn.Parameter(bias()))


class Doubled(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Computes a parameter from another."""

    def forward(self, array: Any) -> Any:  # noqa: ANN401 - a tensor
        """Return twice an array."""
        return 2 * array


@pytest.mark.parametrize("had_bias", [True, False])
@pytest.mark.parametrize(
    "bias", [None, lambda: torch.ones(HIDDEN), lambda: torch.ones(1), lambda: torch.ones(1, HIDDEN)]
)
def test_a_bias_that_is_set_later_is_added_as_it_is(
    bias: Callable[[], Any] | None, *, had_bias: bool
) -> None:
    model, plain = freed_model(bias=had_bias)
    for one in (model, plain):
        set_bias(bias)(one[0])
    x = sample_x()

    with torch.no_grad():
        check(model(x), plain(x))


@pytest.mark.parametrize("had_bias", [True, False])
def test_parameters_of_one_call_take_part_in_it_alone(*, had_bias: bool) -> None:
    model, plain = freed_model(bias=had_bias)
    x = sample_x()
    weights = {**sample_model(bias=had_bias).state_dict(), "0.bias": torch.ones(HIDDEN)}

    for given in (weights, {"0.bias": weights["0.bias"]}):
        check(
            torch.func.functional_call(model, given, x, strict=False),
            torch.func.functional_call(plain, given, x, strict=False),
        )
    check(model(x), plain(x))
    assert isinstance(model[0].weight, torch.nn.Parameter)
    gt.free_weights(model)
    assert type(model[0]) is PackedLinear


@pytest.mark.parametrize(
    "changed",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
        lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
        torch.nn.utils.weight_norm,
        torch.nn.utils.parametrizations.weight_norm,
    ],
)
def test_parameters_may_be_computed_from_others_later(changed: Callable[[Any], Any]) -> None:
    model, plain = freed_model()
    for one in (model, plain):
        changed(one[0])
    x = sample_x()

    with torch.no_grad():
        check(model(x), plain(x))
    assert sorted(dict(model[0].named_parameters())) == sorted(dict(plain[0].named_parameters()))
    gt.restore(model)
    check(model(x), plain(x))


def test_weights_are_made_anew_and_taken_away() -> None:
    model, plain = freed_model()
    before = plain[0].weight

    model[0].reset_parameters()
    assert not torch.equal(model[0].weight, before)

    gt.free_weights(model)
    del model[0].weight
    assert not hasattr(model[0], "weight")


def test_who_reads_weights_is_warned_once_that_they_are_a_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _plain = freed_model()
    assert not caplog.records

    for layer in (model[0], model[2]):
        assert layer.weight.shape == (layer.out_features, layer.in_features)

    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "gemm_tuner.torch.restore" in caplog.text


def test_weights_that_come_back_in_inference_mode_can_be_trained() -> None:
    model, plain = freed_model()
    with torch.inference_mode():
        state = model.state_dict()
        gt.restore(model)
    plain.load_state_dict(state, assign=True)

    for one in (model, plain):
        one(sample_x()).sum().backward()


def test_a_fixed_order_is_refused_where_no_kernel_keeps_it() -> None:
    model, _plain = freed_model(reduction="fixed")

    cast = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), cast, pytest.raises(InvalidSetting, match="without autocast"):
        model(sample_x())
    with torch.no_grad(), pytest.raises(InvalidSetting, match="plain tensor"):
        model(sample_x().to_sparse())
    model(sample_x().requires_grad_()).sum().backward()


def test_rows_of_nested_tensors_are_computed() -> None:
    model, plain = freed_model()
    x = torch.nested.nested_tensor([sample_x(2, K), sample_x(5, K)])

    with torch.no_grad():
        for y, expected in zip(model(x).unbind(), plain(x).unbind(), strict=True):
            check(y, expected)


@pytest.mark.parametrize("kept_of", [torch.nn.Linear, TunedLinear, PackedLinear])
def test_who_kept_the_function_of_a_layer_may_call_it_later(kept_of: type) -> None:
    model, plain = freed_model()
    layer, x = model[0], sample_x()
    if kept_of is not PackedLinear:
        gt.restore(model)
    if kept_of is TunedLinear:
        gt.replace(model, rows=[1, "4..8"], source=Kernels())
    assert type(model[0]) is kept_of
    kept = layer.forward

    with torch.no_grad():
        gt.replace(model, rows=[1, "4..8"], source=Kernels())
        check(kept(x), plain[0](x))
        gt.free_weights(model)
        layer.forward = kept  # as some libraries do, around the function
        check(layer(x), plain[0](x))
        check(torch.compile(layer, backend="eager")(x), plain[0](x))
        del layer.forward
        gt.restore(model)
        check(kept(x), plain[0](x))


def test_a_layer_is_called_while_it_gets_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = freed_model()
    unpacked = packed_linear.PackedWeights.unpacked
    x = sample_x()

    def during_a_call(held: packed_linear.PackedWeights) -> Any:  # noqa: ANN401 - a tensor
        with torch.no_grad():
            check(model(x), plain(x))
        return unpacked(held)

    monkeypatch.setattr(packed_linear.PackedWeights, "unpacked", during_a_call)
    gt.restore(model)

    with torch.no_grad():
        check(model(x), plain(x))
