"""Layers that call kernels, and weights that change in ways that PyTorch does not count."""

import copy
import importlib
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

prune: Any = importlib.import_module("torch.nn.utils.prune")
gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    LINEAR,
    MODULE,
    K,
    N,
    check,
    operator_calls,
    sample_model,
    sample_x,
)

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.eager import tuned_linear  # noqa: E402


def tuned_layer() -> Any:  # noqa: ANN401 - a module
    """Return a layer that has packed its weights."""
    layer = torch.nn.Linear(K, N)
    gt.replace(layer, sample_x(), source=Kernels())
    with torch.no_grad():
        layer(sample_x())
    return layer


def check_as_plain(layer: Any, x: Any = None) -> None:  # noqa: ANN401 - a module and a tensor
    """Check that a layer computes what its weights say."""
    x = sample_x() if x is None else x
    with torch.no_grad():
        check(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_are_followed(name: str) -> None:
    layer = tuned_layer()
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.5, fused=True)

    layer(sample_x()).sum().backward()
    with torch.no_grad():  # packed between the gradient and the step
        layer(sample_x())
    optimizer.step()

    check_as_plain(layer)
    assert operator_calls(layer, sample_x()) == {LINEAR: 1, MODULE: 1}


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_step_is_followed() -> None:
    layer = tuned_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        layer(sample_x()).sum().backward()
        check_as_plain(layer)
        step()
        check_as_plain(layer)


def test_weights_that_others_train_are_followed() -> None:
    layer, tied = tuned_layer(), torch.nn.Linear(K, N)
    tied.weight = layer.weight
    trained: tuple[Callable[[Any], Any], ...] = (
        tied,
        lambda x: torch.nn.functional.linear(x, layer.weight),
        lambda x: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
    )
    for train in trained:
        optimizer = torch.optim.AdamW([layer.weight], lr=0.5, fused=True)
        train(sample_x()).sum().backward()
        optimizer.step()
        check_as_plain(layer)


def test_weights_that_are_views_of_what_is_trained_are_followed() -> None:
    layer, flat = tuned_layer(), torch.nn.Parameter(torch.randn(7 + N * K))
    layer.weight = torch.nn.Parameter(flat.detach()[7:].view(N, K))
    check_as_plain(layer)

    flat.grad = torch.ones_like(flat)
    torch.optim.SGD([flat], lr=0.5, fused=True).step()

    check_as_plain(layer)


def test_a_recorded_call_lets_weights_be_packed_again() -> None:
    layer, tied = tuned_layer(), tuned_layer()
    tied.weight = layer.weight
    check_as_plain(tied)

    layer(sample_x()).sum().backward()
    layer.weight.data -= 0.5 * layer.weight.grad

    check_as_plain(layer)
    check_as_plain(tied)


def test_training_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tuned_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

    def refuse(*_arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tuned_linear.PackedLayer, "_pack", refuse)
    for _ in range(2):
        layer(sample_x()).sum().backward()
        optimizer.step()


def test_refresh_packs_what_nobody_counts() -> None:
    model = torch.nn.Sequential(tuned_layer())
    written: tuple[Callable[[Any], Any], ...] = (
        lambda weight: weight.data,
        lambda weight: weight.detach().numpy(),
    )
    for number, memory_of in enumerate(written):
        memory_of(model[0].weight)[:] = number
        gt.refresh(model)
        check_as_plain(model[0])
    assert operator_calls(model, sample_x()) == {LINEAR: 1, MODULE: 1}


def test_a_graph_of_fx_follows_the_weights() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - imports much

    model, x = torch.nn.Sequential(tuned_layer()), sample_x()
    graph = torch.fx.symbolic_trace(model)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [
        torch.nn.functional.linear
    ]
    with torch.no_grad():
        traced = make_fx(model)(x)
        model[0].weight.mul_(2)
        check(graph(x), model(x))
        check(traced(x), model(x))
    graph.load_state_dict(model.state_dict())


CHANGES: dict[str, Callable[[Any], object]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": lambda layer: torch.nn.utils.parametrizations.spectral_norm(layer).eval(),
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": lambda layer: torch.nn.utils.spectral_norm(layer).eval(),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", list(CHANGES))
def test_weights_that_are_computed_are_those_of_a_plain_layer(name: str) -> None:
    model, x = torch.nn.Sequential(tuned_layer()), sample_x()

    CHANGES[name](model[0])

    check_as_plain(model[0], x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    check_as_plain(model[0], x)
    model(x).sum().backward()
    report = gt.replace(model, x, source=Kernels())
    assert [one.is_taken for one in report] == [False]
    check_as_plain(model[0], x)
    check_as_plain(copy.deepcopy(model)[0] if "old" not in name else model[0], x)
    gt.restore(model)
    assert not isinstance(model[0], tuned_linear.TunedLinear)
    check_as_plain(model[0], x)
    if hasattr(model[0], "parametrizations"):
        torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        assert type(model[0]) is torch.nn.Linear


@pytest.mark.parametrize("is_called", [True, False])
def test_weights_that_become_a_subclass_are_computed_by_it(*, is_called: bool) -> None:
    """As torchao's quantize_ and DTensor do with layers that were replaced."""
    subclass = importlib.import_module("torch.testing._internal.two_tensor").TwoTensor
    layer, x = tuned_layer(), sample_x()
    if not is_called:
        gt.refresh(layer)
    weight = subclass(layer.weight.detach().clone(), torch.rand(N, K))
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    with torch.no_grad():
        y = layer(x)

    assert type(y) is subclass
    check(y.a, torch.nn.functional.linear(x, weight.a, layer.bias))
    check(y.b, torch.nn.functional.linear(x, weight.b, layer.bias))


def test_the_argument_is_called_as_in_pytorch() -> None:
    layer, x = tuned_layer(), sample_x()
    with torch.no_grad():
        check(layer(input=x), layer(x))


class Empty(Kernels):
    """Has no kernel any more."""

    def find(self, wanted: WantedLayer) -> FoundLayer:  # noqa: ARG002 - as in Source
        """Return none."""
        return FoundLayer(kernels=(), reasons=("nothing was tuned for it.",))


def test_a_layer_whose_kernels_are_not_found_again_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, file = sample_model(), sample_x(), io.BytesIO()
    gt.replace(model, x, source=Kernels(text="somewhere"))
    torch.save(model, file)
    file.seek(0)
    monkeypatch.setattr(tuned_linear, "open_source", lambda _text: Empty())

    with caplog.at_level(logging.WARNING), torch.no_grad():
        loaded = torch.load(file, weights_only=False)
        check(loaded(x), model(x))
        loaded(x)

    [warning] = caplog.records
    assert "nothing was tuned for it." in warning.getMessage()


def test_weights_that_were_cast_are_told_and_taken_by_another_replace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = tuned_layer().to(torch.bfloat16)
    tuned_linear.warn_of_plain.cache_clear()
    x = sample_x().to(torch.bfloat16)

    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(3):
            check(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))

    [told] = caplog.messages
    assert "its weights are torch.bfloat16 now, and its kernels are for f32" in told
    assert "replace again" in told
    assert gt.replace(layer, x, source=Kernels()).taken
