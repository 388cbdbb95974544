"""Which products models of PyTorch compute; skipped where PyTorch is not installed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.domain.problem import Problem

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from restricted import full_disk  # noqa: E402
from torch_samples import HEADS, K, N, heads_of, sample_x  # noqa: E402


def _layers_in(path: Path, dtype: str = "f32") -> tuple[Layer, ...]:
    return layers_of(
        m=None, n=None, k=None, shapes=path, dtype=dtype, epilogue="none", w_layout="nk"
    )


def test_modules_of_any_kind_are_collected() -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(N), torch.nn.Linear(N, K))

    with torch.inference_mode():
        found = gt.collect(lazy, sample_x())

    assert {(one.sizes, one.weights) for one in found} == {
        (f"6x{N}x{K}", ("0.weight",)),
        (f"6x{K}x{N}", ("1.weight",)),
    }


def test_products_of_heads_are_collected_as_they_lie() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.softmax(q @ k.mT, -1) @ v

    found = gt.collect(attend, (heads_of(6), heads_of(N), heads_of(N)))

    batch = 2 * HEADS
    assert {(one.problem, one.batch, one.calls) for one in found} == {
        (f"matmul f32 6x{N}x{K} nk none", batch, 1),
        (f"matmul f32 6x{K}x{N} kn none", batch, 1),
    }
    assert all(Problem.parse(one.problem).text == one.problem for one in found)
    assert all(one.share > 0 for one in found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_is_collected_as_one_problem(mode: Any, tmp_path: Path) -> None:  # noqa: ANN401
    attend = torch.nn.functional.scaled_dot_product_attention

    def model(q: Any, k: Any) -> Any:  # noqa: ANN401 - tensors
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        for one in (q, q.bfloat16()):
            attend(one, k.to(one.dtype), k.to(one.dtype), seen, enable_gqa=True)
        attend(q, k, k, is_causal=True, enable_gqa=True)
        wide = torch.zeros(1, 1, 4, 257)  # which no kernel is for
        return attend(k, k, k, is_causal=True), attend(wide, wide, wide)

    with mode():
        found = gt.collect(model, (heads_of(6, 2 * HEADS), heads_of(N)))

    assert {(one.problem, one.batch, one.calls) for one in found} == {
        (f"attention f32 6x{N}x{K} scale+add", 4 * HEADS, 1),
        (f"attention bf16 6x{N}x{K} scale+add", 4 * HEADS, 1),
        (f"attention f32 {N}x{N}x{K} scale+causal", 2 * HEADS, 1),
        ("attention f32 4x4x257 scale", 1, 1),
    }
    assert f"none: attention f32 6x{N}x{K} scale+add" in str(found)
    path = tmp_path / "layers.csv"
    assert found.write_layers(path) == 2
    assert {one.problem.text for one in _layers_in(path)} == {
        one.problem for one in found if one.dtype == "f32" and one.k == K
    }
    assert found.write_layers(path, dtype="bf16") == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_heads_of_one_query_that_share_keys_are_collected_as_rows(mode: Any) -> None:  # noqa: ANN401
    def repeated(k: Any) -> Any:  # noqa: ANN401 - a tensor
        return k[:, :, None].expand(-1, -1, 4, -1, -1).reshape(-1, 4 * HEADS, N, K)

    def model(q: Any, k: Any) -> Any:  # noqa: ANN401 - tensors
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, k, enable_gqa=True), attend(q, repeated(k), repeated(k))

    k = heads_of(N)
    with mode():
        found = gt.collect(model, (heads_of(1, 4 * HEADS), k))

    [one] = found
    assert one.problem == f"attention f32 4x{N}x{K} scale"
    assert (one.batch, one.calls) == (k.shape[0] * HEADS, 2)


def test_names_that_are_no_text_are_written_and_a_fault_keeps_the_file(tmp_path: Path) -> None:
    model, path = torch.nn.Sequential(), tmp_path / "layers.csv"
    model.add_module("\ud800", torch.nn.Linear(K, N))

    found = gt.collect(model, sample_x(3, K))
    assert found.write_layers(path) == 1
    assert "\\ud800_m3,3,17,24,bias" in path.read_text()

    with full_disk(), pytest.raises(OSError, match="File too large"):
        found.write_layers(path)
    assert "\\ud800_m3,3,17,24,bias" in path.read_text()


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
    assert found.rest == pytest.approx(1 - sum(one.share for one in found))
    assert str(found).endswith("everything else, such as operators without such products")
    assert f"none: matmul f32 6x6x{N} nk none" in str(found)
    assert found.write_layers(tmp_path / "layers.csv") == len(found)
    layers = _layers_in(tmp_path / "layers.csv")
    assert {one.problem.text for one in layers} == {one.problem for one in found}
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


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_layer_after_a_transposition_is_one_product(*, has_gradients: bool) -> None:
    class Columns(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(K, N)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return self.layer(x.transpose(-1, -2))

    found = gt.collect(Columns().requires_grad_(has_gradients), torch.rand(3, K, 8))

    assert [(one.problem, one.batch, one.calls) for one in found] == [
        (f"f32 24x{N}x{K} nk bias", 1, 1)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_bytes_alone_are_collected_as_kernels_compute_them(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    last = torch.nn.Linear(N, K, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.ReLU(), last)
    model = model.bfloat16().eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())

    found = gt.collect(model, sample_x(6, K, dtype="bfloat16"))

    assert {(one.problem, one.weights) for one in found} == {
        (f"bf16_s8_f32_bf16 6x{N}x{K} nk:gk bias", ("0.weight",)),
        (f"bf16_s8_f32_bf16 6x{K}x{N} nk:gk none", ("2.weight",)),
    }
    assert found.write_layers(tmp_path / "layers.csv", dtype="bf16_s8_f32_bf16") == 2
    read = _layers_in(tmp_path / "layers.csv", dtype="bf16_s8_f32_bf16")
    assert {one.problem.text for one in read} == {one.problem for one in found}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_4_bits_are_collected_in_their_groups(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    int4 = pytest.importorskip("torchao.prototype.quantization.int4")
    last = torch.nn.Linear(128, 64, bias=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), last, torch.nn.ReLU())
    model = model.bfloat16().eval()
    quantization.quantize_(model, int4.PrototypeInt4WeightOnlyConfig(group_size=32))

    found = gt.collect(model, sample_x(6, 64, dtype="bfloat16"), repeats=2)

    dtype = "bf16_u4_f32_bf16"
    assert {(one.problem, one.weights, one.calls) for one in found} == {
        (f"{dtype} 6x128x64 nk:g32 bias", ("0.weight",), 1),
        (f"{dtype} 6x64x128 nk:g32 none", ("2.weight",), 1),
    }
    assert found.write_layers(tmp_path / "layers.csv", dtype=dtype) == 2
    read = _layers_in(tmp_path / "layers.csv", dtype=dtype)
    assert {one.problem.text for one in read} == {one.problem for one in found}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_convolutions_that_kernels_may_take_are_collected(mode: Any) -> None:  # noqa: ANN401
    """One by an element, one by patches whose bias is that of what normalises, and others."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(K, 128, 1),
        torch.nn.Conv2d(128, 128, 3, stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(128),
        torch.nn.Conv2d(128, N, 3),  # patches of few columns
        torch.nn.Conv2d(N, N, 1, groups=N),
    ).eval()
    x = sample_x(2, K, 11, 11).to(memory_format=torch.channels_last)

    with mode():
        found = gt.collect(model.to(memory_format=torch.channels_last), x)

    assert {(one.problem, one.weights) for one in found} == {
        (f"f32 {2 * 11 * 11}x128x{K} nk bias", ("0.weight",)),
        (f"f32 {2 * 6 * 6}x128x{9 * 128} nk bias", ("1.weight",)),
    }
    assert all(Problem.parse(one.problem).text == one.problem for one in found)


def test_what_kernels_cannot_take_is_not_collected_and_branches_run() -> None:
    convolution = torch.nn.Conv2d(K, N, 1).eval().to(memory_format=torch.channels_last)

    def branches(x: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.cond(x.sum() > 0, convolution, lambda one: convolution(one) * 2, (x,))

    x = sample_x(2, K, 3, 5).to(memory_format=torch.channels_last)
    for model, given in (
        (copy.deepcopy(convolution).double(), x.double()),
        (copy.deepcopy(convolution).half(), x.half()),
        (branches, x),
    ):
        with torch.no_grad():
            assert len(gt.collect(model, given)) == 0


def test_a_width_of_as_many_elements_as_columns_gets_no_bias() -> None:
    patches = torch.nn.Conv2d(3, 8, 2, stride=2, bias=False).eval()
    shift = torch.nn.Parameter(torch.ones(8))

    class Model(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.shift = patches, shift

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return self.patches(x) + self.shift

    with torch.no_grad():
        (found,) = gt.collect(Model(), sample_x(2, 3, 16, 16))

    assert found.problem == f"f32 {2 * 8 * 8}x8x12 nk none"


def test_what_is_added_is_a_bias_where_kernels_add_it() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self, after: Callable[..., Any]) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(K, K, bias=False)
            self.v = torch.nn.Parameter(torch.rand(K))
            self.after = after

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return self.after(self.layer(x), self.v)

    x = sample_x(K, K)
    for after in (
        lambda y, v: y + v,
        lambda y, v: v + y,
        lambda y, v: y.view(K, 1, K).add_(v),
    ):
        [one] = gt.collect(Model(after), x)
        assert one.has_bias
        assert one.weights == ("layer.weight",)
    for after in (
        lambda y, v: torch.relu_(y) + v,
        lambda y, v: torch.add(y, v, alpha=3),
        lambda y, v: y[1:] + v,
        lambda y, v: y.t() + v,
        lambda y, v: y * v + v,
        lambda y, v: y + (v + 1),
        lambda y, _v: y + y[0],
    ):
        [one] = gt.collect(Model(after), x)
        assert not one.has_bias


def test_a_layer_is_named_where_it_counts() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(K, N, bias=False) for _ in range(2))
            self.v = torch.nn.Parameter(torch.rand(N))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return self.b(x) + (self.a(x) + self.v)

    found = {one.has_bias: one.weights for one in gt.collect(Model(), sample_x())}

    assert found == {False: ("b.weight",), True: ("a.weight",)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a prototype
def test_products_of_nested_tensors_are_not_seen_and_nothing_stays_switched_on() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(K, N))
    parts = [torch.rand(3, K), torch.rand(5, K)]

    found = gt.collect(model, torch.nested.nested_tensor(parts, layout=torch.jagged))

    assert list(found) == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
