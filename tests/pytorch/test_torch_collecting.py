"""Which products models of PyTorch compute; skipped where PyTorch is not installed."""

from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli.layers import layers_of

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_samples import K, N, sample_x  # noqa: E402


def test_modules_of_any_kind_are_collected() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(N), torch.nn.Linear(N, K))

    with torch.inference_mode():
        found = gt.collect(lazy, sample_x())

    assert {(one.sizes, one.weights) for one in found} == {
        (f"6x{N}x{K}", ("0.weight",)),
        (f"6x{K}x{N}", ("1.weight",)),
    }


def test_products_are_collected_with_their_weights(tmp_path: Path) -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(K, N), torch.nn.Linear(K, N, bias=False)
            self.experts = torch.nn.Parameter(sample_x(4, K, K))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            if len(x) == 4:
                x = x @ self.experts
            return self.first(x) @ self.second(x).transpose(-1, -2)

    inputs = [sample_x(4, 6, K), sample_x(4, 6, K), (sample_x(1, 1, K),)]
    found = gt.collect(Attention(), inputs, repeats=2)
    facts = {(one.sizes, one.has_bias, one.weights): one.calls for one in found}

    assert facts == {
        (f"24x{N}x{K}", True, ("first.weight",)): 2,
        (f"24x{N}x{K}", False, ("second.weight",)): 2,
        (f"1x{N}x{K}", True, ("first.weight",)): 1,
        (f"1x{N}x{K}", False, ("second.weight",)): 1,
        (f"4 of 6x{K}x{K}", False, ("experts",)): 2,
        (f"4 of 6x6x{N}", False, ()): 2,
        (f"1x1x{N}", False, ()): 1,
    }
    assert 0 < sum(one.share for one in found) < 1
    assert "first.weight" in str(found)
    assert found.write_layers(tmp_path / "layers.csv") == 5
    layers = layers_of(
        m=None,
        n=None,
        k=None,
        shapes=tmp_path / "layers.csv",
        dtype="f32",
        epilogue="none",
        w_layout="nk",
    )
    assert {(one.problem.n, one.problem.k) for one in layers} == {(N, K), (K, K)}
    assert found.write_layers(tmp_path / "layers.csv", dtype="bf16") == 0


def test_weights_are_known_under_autocast() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(K, N)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = self.layer(x)
            return y @ y.T

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gt.collect(Model(), sample_x())

    assert {(one.dtype, one.weights) for one in found} == {
        ("bf16", ("layer.weight",)),
        ("bf16", ()),
    }
