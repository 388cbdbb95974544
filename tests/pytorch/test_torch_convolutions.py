"""Convolutions that call kernels; skipped where PyTorch is not installed."""

from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import LINEAR, K, N, check, operator_calls, passed, sample_x  # noqa: E402

from gemm_tuner.torch.inductor import beside_convolution, compiling  # noqa: E402
from gemm_tuner.torch.inductor.beside_convolution import Beside  # noqa: E402
from gemm_tuner.torch.operators import library  # noqa: E402

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
        (torch.nn.Conv2d(K, K, 1, groups=2), _image(), "2 groups"),
        (torch.nn.Conv2d(K, N, 3), _image(), "for 17 channels of y"),
        (torch.nn.Conv2d(K, 128, 3), sample_x(*SHAPE), "not of channels last"),
        (torch.nn.Conv3d(K, N, 1), sample_x(2, K, 3, 5, 2), ""),
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
    first, *others = enabled.report
    assert "for 24 channels of y" in first.reason
    assert [one.problem.split()[-1] for one in others] == ["bias+relu+add", "bias"]


WIDE = 128  # channels of y, from which on patches that overlap are copied
PATCHES = "gemm_tuner::patches"


def _judge(monkeypatch: pytest.MonkeyPatch, *, is_faster: bool) -> None:
    """Let a product of patches be faster than the convolution, or not, without timing them."""
    beside = Beside(is_faster=is_faster, reason="judged.")
    monkeypatch.setattr(compiling, "is_faster_than_convolution", lambda *_given, **_adds: beside)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("how", "is_last"),
    [
        ({"kernel_size": 3, "padding": 1}, True),
        ({"kernel_size": 3, "padding": 1, "stride": 2, "bias": False}, True),
        ({"kernel_size": (2, 3), "padding": (0, 4), "dilation": (1, 2)}, True),
        ({"kernel_size": 3, "padding": "same", "dilation": 2}, True),
        ({"kernel_size": 1, "stride": 2}, True),
        ({"kernel_size": 1, "stride": 2}, False),
        ({"kernel_size": (3, 2), "stride": (3, 2)}, False),
        ({"kernel_size": 1, "padding": 1}, True),
    ],
)
def test_patches_of_an_image_are_the_rows_of_a_product(
    how: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch, *, is_last: bool
) -> None:
    _judge(monkeypatch, is_faster=True)
    conv = torch.nn.Conv2d(K, WIDE, **how).to(getattr(torch, dtype))
    x, source = _image(dtype) if is_last else sample_x(*SHAPE, dtype=dtype), Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, lambda x: torch.relu(conv(x)), x)
        for bad in (0.0, float("nan"), float("inf")):
            x[1, 2, 0, 3] += bad
            y, expected = graph(x), torch.relu(conv(x))
            check(y, expected, equal_nan=True)
            assert y.stride() == expected.stride()
    calls = operator_calls(graph, x)
    assert (calls[LINEAR], calls[PATCHES]) == (1, 1)
    [wanted] = source.asked
    assert wanted.rows == (expected.numel() // WIDE,)
    assert wanted.k == conv.weight[0].numel()
    assert wanted.epilogue == ("bias+relu" if conv.bias is not None else "relu")
    assert "judged." in enabled.report[0].reason


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_a_block_of_convolutions_is_compiled(
    monkeypatch: pytest.MonkeyPatch, *, cpp_wrapper: bool
) -> None:
    _judge(monkeypatch, is_faster=True)

    class Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.patch = torch.nn.Conv2d(3, WIDE, 2, stride=2)
            self.wide = torch.nn.Conv2d(WIDE, WIDE, 3, padding=1)
            self.narrow = torch.nn.Conv2d(WIDE, WIDE, 1)
            self.beside = torch.nn.Conv2d(WIDE, WIDE, 1, stride=2)
            self.down = torch.nn.Conv2d(WIDE, WIDE, 3, padding=1, stride=2)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            x = self.patch(x)
            x = x + self.narrow(torch.relu(self.wide(x)))
            return torch.relu(self.down(x) + self.beside(x)).flatten(1)

    model = Block().eval().to(memory_format=torch.channels_last)
    source = Kernels(rows=("1..512",))
    gt.enable(source, dynamic_rows=["1..512"])
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        compiled = torch.compile(model)
        for count in (2, 4, 70):  # the last by PyTorch's operators
            x = sample_x(count, 3, 6, 10).to(memory_format=torch.channels_last)
            torch._dynamo.mark_dynamic(x, 0)
            check(compiled(x), model(x))
    epilogues = [one.epilogue for one in source.asked]
    assert {"bias", "bias+relu", "bias+add"} <= set(epilogues)


def _without_memory(*_given: object) -> None:
    message = "no memory\nat all"
    raise RuntimeError(message)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_product_of_patches_is_timed_beside_the_convolution(
    *, is_last: bool, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_convolution, "_KNOWN", {})
    conv = torch.nn.Conv2d(K, WIDE, 2, stride=2, bias=is_last)
    x = _image() if is_last else sample_x(*SHAPE)
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        other = torch.ones_like(conv(x))
        for _ in range(2):
            graph = passed(enabled, lambda x: conv(x) + other if adds else conv(x), x)
            check(graph(x), conv(x) + other if adds else conv(x))
    [beside] = beside_convolution._KNOWN.values()
    assert "PyTorch's convolution took" in beside.reason
    told = [(one.is_taken, beside.reason in one.reason) for one in enabled.report]
    assert told == [(beside.is_faster, True)] * 2
    assert (PATCHES in operator_calls(graph, x)) is beside.is_faster


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("_MOST_BYTES", 1), "its patches would take"),
        (("_rounds", _without_memory), "cannot be timed: no memory"),
        (("_LONGEST_S", 0.0), "PyTorch's convolution took"),
        (("_LOST", 1e9), "PyTorch's convolution took"),
    ],
)
def test_what_is_too_large_to_be_timed_stays(
    change: tuple[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_convolution, "_KNOWN", {})
    monkeypatch.setattr(beside_convolution, *change)
    conv, x = torch.nn.Conv2d(K, WIDE, 3), _image()
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        graph = passed(enabled, conv, x)
        check(graph(x), conv(x))
    assert told in enabled.report[0].reason


@pytest.mark.usefixtures("loops_by_operators")
def test_rows_of_patches_that_no_kernel_is_for_stay() -> None:
    model, source = torch.nn.Conv2d(K, WIDE, 3).eval(), Kernels(rows=("1..2",))
    enabled = gt.enable(source, dynamic_rows=["1..2"])
    x = _image()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert "no kernel is for the 6 rows of patches" in enabled.report[0].reason


@pytest.mark.parametrize("has_onednn", [False, True])
def test_a_convolution_is_pytorchs_where_onednn_has_none(
    monkeypatch: pytest.MonkeyPatch, *, has_onednn: bool
) -> None:
    monkeypatch.setattr(beside_convolution, "_KNOWN", {})
    conv, x = torch.nn.Conv2d(K, WIDE, 3).bfloat16(), _image("bfloat16")
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_onednn, raising=False
    )
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        check(passed(enabled, conv, x)(x), conv(x))
    assert "PyTorch's convolution took" in enabled.report[0].reason


def test_a_convolution_that_is_faster_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _judge(monkeypatch, is_faster=False)
    conv, x = torch.nn.Conv2d(K, WIDE, 3), _image()
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        graph = passed(enabled, conv, x)
        assert torch.equal(graph(x), conv(x))
    assert [(one.is_taken, one.reason) for one in enabled.report] == [(False, "judged.")]
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("x", "how", "told"),
    [
        (torch.ones(2, 3, 4), ([1, 1], [1, 1], [0, 0], [1, 1]), "count, k, height, width"),
        (torch.ones(1, 2, 3, 4), ([1], [1, 1], [0, 0], [1, 1]), "height and width each"),
        (torch.ones(1, 2, 3, 4), ([0, 1], [1, 1], [0, 0], [1, 1]), "must be positive"),
        (torch.ones(1, 2, 3, 4), ([1, 1], [1, 0], [0, 0], [1, 1]), "must be positive"),
        (torch.ones(1, 2, 3, 4), ([1, 1], [1, 1], [-1, 0], [1, 1]), "must be positive"),
        (torch.ones(1, 2, 3, 4), ([4, 1], [1, 1], [0, 0], [1, 1]), "does not fit"),
        (torch.ones(1, 2, 3, 4), ([2**62, 1], [1, 1], [2**62, 0], [1, 1]), "below 2"),
        (torch.ones(1, 2, 3, 4), ([2**31 - 1] * 2, [1] * 2, [2**31 - 1] * 2, [1] * 2), "counted"),
        (torch.ones(1, 2, 1, 1).to("meta"), ([3] * 2, [1] * 2, [0] * 2, [1] * 2), "does not fit"),
    ],
)
def test_patches_that_are_none_are_refused(x: Any, how: Any, told: str) -> None:  # noqa: ANN401
    library()
    with pytest.raises(RuntimeError, match=told):
        torch.ops.gemm_tuner.patches(x, *how)


def test_patches_pass_the_checks_of_pytorch() -> None:
    library()
    operator = torch.ops.gemm_tuner.patches.default
    for x in (_image(), sample_x(*SHAPE), _image("bfloat16")[:, :, ::2], _image()[:0]):
        torch.library.opcheck(operator, (x, [2, 3], [1, 2], [1, 1], [1, 1]))
    recorded = _image().requires_grad_()
    with pytest.raises(NotImplementedError, match="derivative"):
        operator(recorded, [1, 1], [1, 1], [0, 0], [1, 1])


class _Normalised(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A convolution, and what `after` makes of its y and of a normalisation."""

    def __init__(self, after: Any, n: int, *window: int, bias: bool = False) -> None:  # noqa: ANN401
        super().__init__()
        self.conv = torch.nn.Conv2d(K, n, *window, bias=bias)
        self.norm, self.other = torch.nn.BatchNorm2d(n), torch.nn.BatchNorm2d(n)
        for norm in (self.norm, self.other):
            for parameter in (norm.weight, norm.bias, norm.running_mean):
                torch.nn.init.normal_(parameter)
            torch.nn.init.uniform_(norm.running_var, 0.5, 2.0)
        self.after = after

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        return self.after(self, self.conv(x), x)


def _by_the_batch(self: Any, y: Any, x: Any) -> Any:  # noqa: ANN401 - tensors
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    return torch.nn.functional.batch_norm(y, mean[:N], var[:N], self.norm.weight, self.norm.bias)


def _frozen(self: Any, y: Any, _x: Any) -> Any:  # noqa: ANN401 - tensors
    """Normalise as models do that are trained with fixed statistics."""
    norm = self.norm
    scale = norm.weight.reshape(1, -1, 1, 1) * (norm.running_var.view(1, -1, 1, 1) + 1e-5).rsqrt()
    return y * scale + (norm.bias.reshape(1, -1, 1, 1) - norm.running_mean[:, None, None] * scale)


def _unread(self: Any, y: Any, x: Any) -> Any:  # noqa: ANN401 - tensors
    result = self.norm(y)
    self.conv(x)
    return result


@pytest.mark.parametrize(
    ("after", "n", "window", "asked"),
    [
        (lambda self, y, _x: self.norm(y), N, (1,), "bias"),
        (_frozen, N, (1,), "bias"),
        (_unread, N, (1,), "bias"),
        (lambda self, y, _x: y / self.norm.weight.exp()[:, None, None], N, (1,), "none"),
        (lambda self, y, _x: torch.relu(self.norm(y)), N, (1,), "bias+relu"),
        (lambda self, y, _x: self.norm(y), 128, (3, 2, 1), "bias"),
        (lambda self, y, _x: self.norm(y) + y, N, (1,), "none"),
        (lambda self, y, _x: self.norm(y) + self.other(y), N, (1,), "none"),
        (lambda self, y, _x: self.other(self.norm(y)), N, (1,), "bias"),
        (lambda self, y, _x: 2 - y * self.norm.weight[:, None, None], N, (1,), "none"),
        (lambda self, y, _x: self.norm.weight[:, None, None] - y, N, (1,), "none"),
        (lambda self, y, _x: y * self.norm.weight[: y.shape[-1]], N, (1,), "none"),
        (_by_the_batch, N, (1,), "none"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_what_normalises_channels_is_folded_into_weights_and_bias(
    after: Any,  # noqa: ANN401
    n: int,
    window: tuple[int, ...],
    asked: str,
    dtype: str,
    *,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "is_faster_than_convolution", lambda *_, **__: Beside(True, ""))
    model = _Normalised(after, n, *window, bias=bias).eval().to(getattr(torch, dtype))
    model = model.to(memory_format=torch.channels_last)
    x, source = _image(dtype), Kernels()
    enabled = gt.enable(source)
    with torch.no_grad():
        graph = passed(enabled, model, x, decompositions=select_decomp_table())
        y, expected = graph(x), model(x)

    check(y, expected)
    assert y.stride() == expected.stride()
    (layer,) = enabled.report.taken
    assert layer.problem.split()[-1] == ("bias" if bias and asked == "none" else asked)


def test_what_is_cast_before_it_is_normalised_keeps_its_bits() -> None:
    """Freezing leaves it too: weights of 16 bits would be rounded twice."""
    convolution, norm = torch.nn.Conv2d(K, N, 1, bias=False).bfloat16(), torch.nn.BatchNorm2d(N)
    torch.nn.init.normal_(norm.eval().bias)
    enabled, x = gt.enable(Kernels()), _image("bfloat16")
    with torch.no_grad():
        passed(
            enabled,
            lambda x: norm(convolution(x).float()).bfloat16(),
            x,
            decompositions=select_decomp_table(),
        )

    (layer,) = enabled.report
    assert layer.problem.split()[-1] == "none"


def test_collect_and_enable_ask_for_the_same_of_what_is_normalised() -> None:
    for after in (
        lambda self, y, _x: self.norm(y),
        lambda self, y, _x: self.norm(y) + y,
        lambda self, y, _x: self.norm(y) + self.other(y),
        _by_the_batch,
    ):
        model = _Normalised(after, N, 1).eval().to(memory_format=torch.channels_last)
        enabled = gt.enable(Kernels())
        with torch.no_grad():
            (found,) = gt.collect(model, _image())
            passed(enabled, model, _image(), decompositions=select_decomp_table())

        (layer,) = enabled.report
        assert found.problem.split()[-1] == layer.problem.split()[-1]
