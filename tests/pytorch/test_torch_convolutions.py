"""Convolutions by one element that call kernels; skipped where PyTorch is not installed."""

from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import LINEAR, K, N, check, operator_calls, passed, sample_x  # noqa: E402

SHAPE = (2, K, 3, 5)


def _image(dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    return sample_x(*SHAPE, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("compute", "asked", "dtype"),
    [
        (lambda conv, x: conv(x), "bias", "bfloat16"),
        (lambda conv, x: torch.conv2d(x, conv.weight), "none", "float32"),
        (lambda conv, x: torch.conv2d(x, conv.weight, conv.bias, dilation=3), "bias", "float32"),
        (lambda conv, x: torch.nn.functional.silu(conv(x)), "bias+silu", "bfloat16"),
        (lambda conv, x: conv(x) + x, "bias+add", "float32"),
        (lambda conv, x: torch.relu(conv(x)) + x, "bias+relu+add", "float32"),
        (lambda conv, x: conv(x) + x.contiguous(), "bias", "float32"),
        (lambda conv, x: conv(x).flatten(0, 1).relu(), "bias", "float32"),
        (lambda conv, x: conv(x).mean((2, 3)), "bias", "float32"),
    ],
)
def test_a_convolution_by_one_element_is_a_product(compute: Any, asked: str, dtype: str) -> None:  # noqa: ANN401
    conv = torch.nn.Conv2d(K, K, 1).to(getattr(torch, dtype))
    x, source = _image(dtype), Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda x: compute(conv, x), x)
        for bad in (0.0, float("nan"), float("inf")):
            x[1, 2, 0, 3] += bad
            y, expected = graph(x), compute(conv, x)
            check(y, expected, equal_nan=True)
            assert y.stride() == expected.stride()
    assert operator_calls(graph, x)[LINEAR] == 1
    assert [(one.rows, one.epilogue) for one in source.asked] == [((30,), asked)]


@pytest.mark.parametrize(
    ("convolution", "x", "told"),
    [
        (torch.nn.Conv2d(K, N, 1), sample_x(*SHAPE), "not of channels last"),
        (torch.nn.Conv2d(K, N, 1, stride=2), _image(), r"stride is [2, 2]"),
        (torch.nn.Conv2d(K, N, 1, padding=1), _image(), r"padding is [1, 1]"),
        (torch.nn.Conv2d(K, K, 1, groups=2), _image(), "2 groups"),
        (torch.nn.Conv2d(K, N, 3), _image(), ""),
        (torch.nn.ConvTranspose2d(K, N, 1), _image(), ""),
        (torch.nn.Conv1d(K, N, 1), sample_x(2, K, 5), ""),
        (torch.nn.Conv2d(K, N, 1).double(), _image("float64"), ""),
        (torch.nn.Conv2d(K, N, 1), _image()[:0], ""),
    ],
)
def test_other_convolutions_are_left(convolution: Any, x: Any, told: str) -> None:  # noqa: ANN401
    source = Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, convolution, x)
        check(graph(x), convolution(x))
    assert not source.asked
    assert len(enabled.report) == bool(told)
    assert told in str(enabled.report)


def test_weights_that_the_model_computes_are_left() -> None:
    source, x = Kernels(), _image()
    enabled = gt.enable(source)
    with torch.no_grad():
        passed(enabled, lambda x: torch.conv2d(x, torch.ones(N, K, 1, 1) * x.sum()), x)
    assert not source.asked


def test_images_are_compiled_for_any_batch() -> None:
    class Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(3, K, 3, padding=1)
            self.middle, self.last = torch.nn.Conv2d(K, K, 1), torch.nn.Conv2d(K, N, 1)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = torch.relu(self.first(x))
            return self.last(torch.relu(self.middle(y)) + y)

    model = Block().eval().to(memory_format=torch.channels_last)
    source = Kernels(rows=("1..64",))
    enabled = gt.enable(source, dynamic_rows=["1..64"])
    with torch.no_grad():
        compiled = torch.compile(model)
        for count in (2, 4, 7):  # the last by PyTorch's operators
            x = sample_x(count, 3, 3, 5).to(memory_format=torch.channels_last)
            torch._dynamo.mark_dynamic(x, 0)
            check(compiled(x), model(x))
            assert compiled(x).stride() == model(x).stride()
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert [one.problem.split()[-1] for one in enabled.report] == ["bias+relu+add", "bias"]
