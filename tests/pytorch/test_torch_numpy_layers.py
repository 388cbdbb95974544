"""Tensors where NumPy's arrays are the rule; skipped where PyTorch is not installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from gemm_tuner import linear, quantise_activations, quantise_channels  # noqa: E402 - after PyTorch
from gemm_tuner.errors import InvalidArray  # noqa: E402


def rows(count: int = 5) -> Any:  # noqa: ANN401 - a tensor
    return torch.randn(count, 40, generator=torch.Generator().manual_seed(3))[:, :33]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("element", ["u8", "s8"])
def test_tensors_are_quantised_as_arrays_are(name: str, element: Any) -> None:  # noqa: ANN401
    x = rows().to(getattr(torch, name))
    array = x.to(torch.float32).numpy()

    made = quantise_activations(x, element)
    again = quantise_activations(x, element, out=made)
    wanted = quantise_activations(array, element)

    assert again is made
    assert made.x.dtype is {"u8": torch.uint8, "s8": torch.int8}[element]
    np.testing.assert_array_equal(made.x.numpy(), wanted.x)
    np.testing.assert_array_equal(made.scale.numpy(), wanted.scale)
    np.testing.assert_array_equal(quantise_channels(x).w, quantise_channels(array).w)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_layer_takes_tensors_and_returns_one(
    dtype: Any,  # noqa: ANN401 - a word or None
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plain = torch.nn.Linear(33, 7)
    layer = linear(plain.weight.detach(), plain.bias.detach(), "relu", dtype=dtype)

    for count in (0, 5, 5):
        y = layer(rows(count))
        expected = torch.relu(plain(rows(count))).detach()
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 if dtype is None else 0.03)
    with pytest.raises(InvalidArray, match=r"w is a Parameter .* pass w.detach\(\)"):
        linear(plain.weight)
    with pytest.raises(InvalidArray, match="x is a Tensor that its library does not share"):
        layer(rows().requires_grad_())
    with pytest.raises(InvalidArray, match="x is a Tensor that its library does not share"):
        layer(torch.nested.nested_tensor([rows(), rows()]))
