"""Batches whose products all have one w, of layers without gradients; skipped without PyTorch."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Inductor's own path
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_quantising import quantised  # noqa: E402
from torch_samples import K, N, check, sample_x  # noqa: E402


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class _Columns(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A layer whose x is columns."""

    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(K, N, bias=has_bias)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.nn.functional.gelu(self.layer(x.transpose(-1, -2)))


@pytest.mark.parametrize(
    ("shape", "dtype", "has_bias"),
    [
        ((1, K, 6), "float32", True),
        ((3, K, 6), "bfloat16", True),
        ((2, 3, K, 6), "float32", False),
    ],
)
def test_a_layer_without_gradients_is_one_product(
    shape: tuple[int, ...],
    dtype: str,
    *,
    has_bias: bool,
) -> None:
    model = _Columns(has_bias=has_bias).eval().requires_grad_(False).to(getattr(torch, dtype))
    x = sample_x(*shape, dtype=dtype)
    enabled = gt.enable(Kernels(rows=("1..99",)))

    check(torch.compile(model)(x), model(x))

    [layer] = enabled.report
    assert layer.is_taken
    assert layer.name == "layer"


@pytest.mark.parametrize("known", ["batch", "rows"])
def test_a_length_may_be_known_when_it_runs(known: str) -> None:
    model = _Columns().eval().requires_grad_(False)
    enabled = gt.enable(Kernels(rows=("1..99",)), dynamic_rows=["1..99"])
    compiled = torch.compile(model)

    for batch, rows in ((3, 6), (5, 6) if known == "rows" else (3, 9)):
        x = sample_x(batch, K, rows)
        torch._dynamo.mark_dynamic(x, 0 if known == "rows" else 2)
        check(compiled(x), model(x))

    assert [one.is_taken for one in enabled.report] == [True]


@pytest.mark.parametrize("shape", [(0, K, 6), (2, K, 0)])
def test_no_rows_are_left(shape: tuple[int, ...]) -> None:
    model, x = _Columns().eval().requires_grad_(False), sample_x(*shape)
    gt.enable(Kernels(rows=("1..99",)))
    assert torch.compile(model)(x).shape == model(x).shape


def test_matrices_that_differ_stay_a_batch() -> None:
    w = torch.nn.Parameter(torch.rand(2, 1, K, N), requires_grad=False)

    class Batch(torch.nn.Module):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return torch.bmm(x, self.w.expand(2, 3, K, N).reshape(6, K, N))

    model, x = Batch().eval(), sample_x(6, 5, K)
    gt.enable(Kernels(rows=("1..99",)))
    check(torch.compile(model)(x), model(x))


def test_a_quantised_layer_is_one_product() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    x = sample_x(2, K, 6)
    model = quantised(_Columns().eval(), x)
    enabled = gt.enable(Kernels(rows=("1..99",)))

    torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-4, atol=1e-5)

    [layer] = enabled.report
    assert layer.is_taken
    assert "u8_s8_s32" in str(layer)


class _Times(torch.nn.Module):  # type: ignore[misc]  # as above
    """A batch by one w."""

    def __init__(self, w: Any) -> None:  # noqa: ANN401 - a tensor
        super().__init__()
        self.register_buffer("w", w)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.bmm(x, self.w.expand(x.shape[0], -1, -1))


def test_integers_stay_a_batch() -> None:
    model, x = _Times(torch.arange(24).reshape(6, 4)), torch.arange(36).reshape(2, 3, 6)
    gt.enable(Kernels())
    assert torch.equal(torch.compile(model)(x), model(x))


def test_a_batch_whose_length_is_found_by_the_model() -> None:
    model = _Times(torch.rand(K, N))
    gt.enable(Kernels(rows=("1..99",)), dynamic_rows=["1..99"])

    def chosen(x: Any, mask: Any) -> Any:  # noqa: ANN401 - tensors
        return model(x[mask.nonzero().squeeze(-1)])

    x, mask = sample_x(4, 5, K), torch.tensor([1, 0, 1, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(torch.compile(chosen, dynamic=True)(x, mask), model(x[[0, 2, 3]]))
