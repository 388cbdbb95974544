"""Which calls of a layer are seen before kernels are asked for, and which layers are left."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

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


class Unlike(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    """A layer of two tensors in one argument."""

    def forward(self, pair: Any) -> Any:  # noqa: ANN401 - tensors
        """Return the sum of both."""
        return super().forward(pair[0] + pair[1])


class Calling(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A model that calls a layer in a way of its own."""

    def __init__(self, layer: Any, call: Callable[[Any, Any], Any]) -> None:  # noqa: ANN401
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        """Call the layer."""
        return self.call(self.layer, x)


def test_a_layer_of_other_arguments_is_left() -> None:
    model = Calling(Unlike(K, N), lambda layer, x: layer((x, x)))
    [replaced] = gt.replace(model, sample_x(), source=Kernels())
    [timed] = gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0).layers
    for left in (replaced, timed):
        assert not left.is_taken
        assert "it is a Unlike" in left.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer.forward(x),
        lambda layer, x: layer(input=x),
        lambda layer, x: layer.forward(input=x),
    ],
)
def test_each_way_to_call_a_layer_is_seen(call: Callable[[Any, Any], Any], dtype: str) -> None:
    model, x = Calling(sample_model(dtype)[0], call), sample_x(dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        [report] = gt.replace(model, x, source=Kernels())
        assert (report.is_taken, report.rows) == (True, (6,))
        check(model(x), expected)
    assert operator_calls(model, x) == {LINEAR: 1, MODULE: 1}
    assert "forward" not in vars(model.layer)


def test_a_lazy_layer_is_seen_at_its_first_call() -> None:
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(N)), sample_x()
    [report] = gt.replace(model, x, source=Kernels())
    assert (report.is_taken, report.rows) == (True, (6,))
    with torch.no_grad():
        check(model(x), torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert operator_calls(model, x) == {LINEAR: 1, MODULE: 1}


def test_what_cannot_be_seen_is_not_denied() -> None:
    layer = torch.nn.Linear(K, N)
    model = Calling(layer, lambda one, x: torch.nn.functional.linear(x, one.weight, one.bias))
    [report] = gt.replace(model, sample_x(), source=Kernels())
    assert "no call of it was seen" in report.reason

    layer.forward = lambda x: 2 * x
    [report] = gt.replace(Calling(layer, layer.__class__.__call__), sample_x(), source=Kernels())
    assert "its forward was replaced" in report.reason


def test_weights_of_inference_mode_are_left() -> None:
    with torch.inference_mode():
        model = sample_model()
    report = gt.replace(model, sample_x(), source=Kernels())
    assert not report.taken
    assert all("inference mode" in one.reason for one in report)
