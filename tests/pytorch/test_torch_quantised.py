"""Quantised models of PyTorch call kernels on bytes; skipped where torchao is not installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Inductor's own path
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 - after PyTorch was found
from torch_kernels import Kernels  # noqa: E402
from torch_quantising import Layers, quantised  # noqa: E402
from torch_samples import check, passed, sample_x  # noqa: E402

from gemm_tuner.torch.inductor.exporting import write_kernels  # noqa: E402

X_STEPS = "x_zero_point+channel_scale"
# The zero point of y and its seven bits.
Y_STEPS = "scale+y_zero_point+clamp:0:127"
EPILOGUES = [
    f"u8_s8_s32_u8 {X_STEPS}+bias+relu+{Y_STEPS}",
    f"u8_s8_s32_u8 {X_STEPS}+bias+add+{Y_STEPS}",
    f"u8_s8_s32_u8 {X_STEPS}+silu+{Y_STEPS}",
    f"u8_s8_s32_f32 {X_STEPS}+bias",
]


def asked(source: Kernels) -> list[str]:
    return [f"{one.dtype} {one.epilogue}" for one in source.asked]


def check_steps(y: Any, expected: Any) -> None:  # noqa: ANN401 - tensors
    """Check what a quantised model computed: at most some bytes are rounded the other way."""
    assert float((y - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    assert torch.equal(y.argmax(-1), expected.argmax(-1))


@pytest.mark.usefixtures("loops_by_operators")
def test_a_quantised_model_calls_kernels_on_bytes() -> None:
    model, x = Layers().eval(), torch.randn(2, 3, 24)
    source = Kernels(lack=lambda wanted: wanted.n == 24)
    with torch.no_grad():
        converted = quantised(model, x)
        expected = converted(x)
        enabled = gt.enable(source)
        compiled = torch.compile(converted)
        y, [code] = torch._inductor.utils.run_and_get_code(compiled, x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        # The one without a kernel is Inductor's own, with its sum and its bytes.
        assert code.count("torch.ops.gemm_tuner.fused_linear") >= 3
        assert code.count("torch.ops.onednn.qlinear_pointwise.binary_tensor(") == 1
        assert "gemm_tuner.pack" not in code
        assert [one.is_taken for one in enabled.report] == [True, False, True, True]
        assert [
            f"{dtype} {epilogue}"
            for dtype, _sizes, epilogue in (one.problem.split() for one in enabled.report)
        ] == EPILOGUES
        with torch.profiler.profile() as profile:
            compiled(x)
        named = [one.key for one in profile.key_averages() if one.key.startswith("gemm-tuner u8")]
        # x of 6 x 24 bytes, w of 40 x 24, y of 6 x 40
        assert any("bias+relu" in one and "0.01152 MFLOP, 0.001344 MB" in one for one in named)
        found = gt.debug(compiled, x)
        assert found.wrong is None
        assert len(found.layers) == 3
        assert "No layer is wrong, and the output is within" in found.verdict
        # Inductor's own path for all of them.
        gt.disable()
        torch._dynamo.reset()
        with torch._inductor.config.patch(freezing=True):
            by_inductor = torch.compile(converted)(x)
        check_steps(y, by_inductor)
    error = gt.compare(model, converted, x, classes=-1)
    assert 0 < error.mean_error < error.largest_error < 0.1 * error.largest
    assert gt.compare(by_inductor.clone, lambda: y, (), classes=-1).top1 == 1.0


@pytest.mark.usefixtures("loops_by_operators")
def test_x_that_is_quantised_when_it_comes_is_multiplied_as_bytes() -> None:
    model, x = Layers().eval(), torch.randn(6, 24)
    source = Kernels()
    with torch.no_grad():
        converted = quantised(model, x, is_dynamic=True)
        gt.enable(source)
        y, [code] = torch._inductor.utils.run_and_get_code(torch.compile(converted), x)
        torch.testing.assert_close(y, converted(x), rtol=1e-4, atol=1e-5)
    assert "qlinear" not in code
    assert asked(source) == [
        f"u8_s8_s32_f32 {X_STEPS}+{steps}" for steps in ("bias+relu", "bias+add")
    ] + [f"u8_s8_s32_f32 {X_STEPS}+silu", f"u8_s8_s32_f32 {X_STEPS}+bias"]


def test_a_model_that_was_trained_for_it_is_the_same_graph() -> None:
    model, x = Layers().train(), torch.randn(6, 24)
    source = Kernels()
    converted = quantised(model, x, is_qat=True)
    graph = passed(gt.enable(source), converted, x)
    assert asked(source) == EPILOGUES
    with torch.no_grad():
        check_steps(graph(x), converted(x))


def test_operations_are_counted() -> None:
    x = torch.randn(6, 24)
    with torch.no_grad():
        graph = passed(gt.enable(Kernels()), quantised(torch.nn.Linear(24, 40).eval(), x), x)
        with FlopCounterMode(display=False) as counter:
            graph(x)
    assert counter.get_total_flops() == 2 * 6 * 24 * 40


class _ByHand(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A layer of bytes as a quantizer of one's own may make it."""

    def __init__(
        self,
        x_type: Any,  # noqa: ANN401 - of PyTorch
        *,
        w_zero: int = 0,
        k: int = 24,
        x_zero: int = 3,
        w_limits: tuple[int, int] = (-128, 127),
        columns: int = 17,
    ) -> None:
        super().__init__()
        self.x_type, self.x_zero, self.w_limits = x_type, x_zero, w_limits
        self.register_buffer("w", torch.randint(-127, 128, (17, k), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(17) / 100)
        self.register_buffer("zero", torch.full((17,), w_zero))
        self.bias = torch.nn.Parameter(torch.randn(columns))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        ops, limits = torch.ops.quantized_decomposed, torch.iinfo(self.x_type)
        how = (*self.scale_of(x), limits.min, limits.max, self.x_type)
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how)
        return self.made_of(torch.nn.functional.linear(x, self.floats_of_w(), self.bias))

    def floats_of_w(self) -> Any:  # noqa: ANN401 - a tensor
        how = (0, *self.w_limits, torch.int8)
        ops = torch.ops.quantized_decomposed
        return ops.dequantize_per_channel(self.w, self.scale, self.zero, *how)

    def scale_of(self, _x: Any) -> tuple[Any, Any]:  # noqa: ANN401 - a tensor
        return 0.05, self.x_zero

    def made_of(self, y: Any) -> Any:  # noqa: ANN401 - a tensor
        limits = torch.iinfo(self.x_type)
        how = (0.03, 5, limits.min, limits.max, self.x_type)
        return torch.ops.quantized_decomposed.quantize_per_tensor(y, *how)


@pytest.mark.parametrize("x_type", ["uint8", "int8"])
def test_rows_without_a_kernel_are_computed_from_plain_bytes(x_type: str) -> None:
    model, x = _ByHand(getattr(torch, x_type)), torch.randn(5, 24) * 3
    source = Kernels(rows=("6..64",))
    graph = passed(gt.enable(source), model, x)
    name = "u8" if x_type == "uint8" else "s8"
    assert asked(source) == [f"{name}_s8_s32_{name} {X_STEPS}+bias+scale+y_zero_point"]
    with torch.no_grad():
        for rows in (5, 6, 64, 65, 200):
            x = torch.randn(rows, 24) * 3
            y, expected = graph(x), model(x)
            assert y.dtype == expected.dtype
            assert int((y.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize("w_limits", [(-128, 127), (-8, 7), (0, 0)])
def test_sums_beyond_32_bits_are_left_with_the_reason(w_limits: tuple[int, int]) -> None:
    source = Kernels()
    enabled = gt.enable(source)
    passed(enabled, _ByHand(torch.uint8, k=65794, w_limits=w_limits), torch.randn(1, 65794))
    [one] = enabled.report
    assert not source.asked
    assert one.reason == (
        "its k is 65794, and 32 bits hold the sum of at most 65793 products of bytes."
    )


class _ByChannelOfK(_ByHand):
    def floats_of_w(self) -> Any:  # noqa: ANN401 - a tensor
        how = (1, *self.w_limits, torch.int8)
        scale, zero = torch.ones(24) / 100, torch.zeros(24, dtype=torch.int64)
        ops = torch.ops.quantized_decomposed
        return ops.dequantize_per_channel(self.w, scale, zero, *how)


class _OfOneScale(_ByHand):
    def floats_of_w(self) -> Any:  # noqa: ANN401 - a tensor
        how = (0.01, 0, *self.w_limits, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(self.w, *how)


class _Cut(_ByHand):
    def floats_of_w(self) -> Any:  # noqa: ANN401 - a tensor
        return super().floats_of_w()[:9]

    def made_of(self, y: Any) -> Any:  # noqa: ANN401 - a tensor
        return y


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_ByHand(torch.uint8), ""),
        (_ByHand(torch.uint8, w_zero=2), "its weights have zero points."),
        (_ByHand(torch.uint8, x_zero=300), "its x is not of bytes with one scale and a zero "),
        (_ByChannelOfK(torch.uint8), "its weights are not signed bytes with a scale for each row"),
        (_OfOneScale(torch.uint8), "its weights have one scale for all of them"),
        (_Cut(torch.uint8, columns=9), "its weights are cast, cut or turned between their bytes"),
    ],
)
def test_each_layer_of_bytes_is_taken_or_the_report_says_why_not(model: Any, reason: str) -> None:  # noqa: ANN401
    source = Kernels()
    enabled = gt.enable(source)
    passed(enabled, model, torch.randn(5, 24))
    [one] = enabled.report
    assert one.is_taken == bool(source.asked) == (not reason)
    assert reason in one.reason


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_x_may_have_any_shape_of_one_element(shape: tuple[int, ...]) -> None:
    class Found(_ByHand):
        def scale_of(self, x: Any) -> tuple[Any, Any]:  # noqa: ANN401 - a tensor
            return (x.abs().max() / 100).reshape(shape), torch.full(shape, 100)

        def made_of(self, y: Any) -> Any:  # noqa: ANN401 - a tensor
            return y

    model, x, source = Found(torch.uint8), torch.randn(6, 24), Kernels()
    graph = passed(gt.enable(source), model, x)
    assert len(source.asked) == 1
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)


def test_floats_that_others_read_too_stay_floats() -> None:
    class Read(_ByHand):
        def made_of(self, y: Any) -> Any:  # noqa: ANN401 - a tensor
            return y, super().made_of(y)

    model, x, source = Read(torch.uint8), torch.randn(6, 24), Kernels()
    graph = passed(gt.enable(source), model, x)
    assert asked(source) == [f"u8_s8_s32_f32 {X_STEPS}+bias"]
    with torch.no_grad():
        torch.testing.assert_close(graph(x)[0], model(x)[0], rtol=1e-4, atol=1e-5)


def test_the_products_of_a_quantised_model_are_collected(tmp_path: Path) -> None:
    x = torch.randn(6, 24)
    found = gt.collect(quantised(Layers().eval(), x), x, repeats=1)
    assert {one.dtype for one in found} == {"u8_s8_s32_f32"}
    assert sorted(one.weights for one in found) == [(f"_frozen_param{one}",) for one in range(4)]
    found.write_layers(tmp_path / "layers.csv", dtype="u8_s8_s32_f32")
    lines = (tmp_path / "layers.csv").read_text().splitlines()
    assert len(lines) == 5
    assert f"_frozen_param3_m6,6,10,40,{X_STEPS}+bias," in "\n".join(lines)


LOADER = """
import sys, torch, gemm_tuner.torch as gt
gt.load_kernels(sys.argv[1])
given = torch.load(sys.argv[2])
with torch.no_grad():
    y = torch.ops.gemm_tuner.fused_linear(*given["arguments"])
assert torch.equal(y, given["y"]) and y.dtype == torch.uint8
"""


def test_another_process_reads_kernels_of_bytes(tmp_path: Path) -> None:
    x = torch.randn(6, 24)
    enabled = gt.enable(Kernels())
    with torch.no_grad():
        graph = passed(enabled, _ByHand(torch.uint8), x)
        [node] = graph.graph.find_nodes(
            op="call_function", target=torch.ops.gemm_tuner.fused_linear.default
        )
        interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
        y = interpreter.run(x)
        arguments = torch.fx.node.map_arg(node.args, interpreter.env.__getitem__)
        arguments = [list(one) if isinstance(one, list) else one for one in arguments]
    torch.save({"arguments": arguments, "y": y}, tmp_path / "call.pt")
    write_kernels(tmp_path / "kernels", enabled._taken.values())
    command = [sys.executable, "-c", LOADER, str(tmp_path / "kernels"), str(tmp_path / "call.pt")]
    subprocess.run(command, check=True, timeout=60)


# In bf16, PyTorch 2.13 ends by SIGSEGV in its own kernel with AVX-512 where k is no multiple of 16.
@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(("dtype", "taken"), [("float32", 3), ("bfloat16", 4)])
def test_weights_of_bytes_alone_are_packed_with_their_scales(dtype: str, taken: int) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 - it warns

    model = Layers().eval().to(getattr(torch, dtype))
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    x, source = (
        sample_x(2, 3, 24, dtype=dtype),
        Kernels(lack=lambda wanted: taken == 3 and wanted.n == 10),
    )
    with torch.no_grad():
        expected = model(x)
        enabled = gt.enable(source)
        compiled = torch.compile(model)
        y, [code] = torch._inductor.utils.run_and_get_code(compiled, x)
        check(y, expected)
        assert code.count("torch.ops.gemm_tuner.linear.default(") == taken
        assert "gemm_tuner.pack" not in code
        found = gt.debug(compiled, x, folder=None)
        assert found.wrong is None
        assert len(found.layers) == taken
        [*_, last] = (one for one in model.modules() if isinstance(one, torch.nn.Linear))
        last.weight.scale.mul_(2)  # a part of a weight; the others are found where they were
        for _ in range(2):
            check(compiled(x), model(x))
            torch._dynamo.reset()
    short = "f32" if dtype == "float32" else "bf16"
    epilogues = ["bias+relu", "bias+add", "silu", "bias"]
    assert asked(source)[:4] == [f"{short}_s8_f32_{short} {one}" for one in epilogues]
    assert {one.w_layout for one in source.asked} == {"nk:gk"}
    assert [one.is_taken for one in enabled.report][:4] == [True, True, True, taken == 4]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("place", [0, 1])
def test_a_copy_of_sums_of_bytes_is_no_end(place: int) -> None:
    class Copied(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(-127, 128, (17, 24), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(17) / 100)
            self.register_buffer("shift", torch.rand(17))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = torch.nn.functional.linear(x, self.w.to(x.dtype))
            y = y.clone() if place == 0 else y
            y = y * self.scale
            return (y.clone() if place == 1 else y) + self.shift

    model, x, source = Copied().eval(), sample_x(2, 3, 24), Kernels()
    gt.enable(source)
    with torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert asked(source)[:1] == ["f32_s8_f32_f32 bias"]


def test_rows_without_a_kernel_are_computed_from_scaled_weights() -> None:
    class ByBytes(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randint(-127, 128, (17, 24), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(17) / 100)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.mm(x, self.w.t().to(torch.float32)) * self.scale

    model = ByBytes()
    graph = passed(gt.enable(Kernels(rows=("6..64",))), model, torch.randn(5, 24))
    with torch.no_grad():
        for rows in (5, 6, 65):
            x = torch.randn(rows, 24)
            check(graph(x), model(x))
