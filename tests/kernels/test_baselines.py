from collections.abc import Iterator

import pytest
from _pytest.mark.structures import ParameterSet
from library_processes import Libraries
from needs import need_whole_sums_of_bytes
from planted import build_planted

from gemm_tuner.bench.baselines.choose import AUTO, Race
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.machine.detect import detect_cpu


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    with Libraries(tmp_path_factory.mktemp("libraries")) as processes:
        yield processes


@pytest.fixture(scope="module")
def no_mkl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    folder = tmp_path_factory.mktemp("libraries_without_mkl")
    with Libraries(folder, hidden_wheel="mkl") as processes:
        yield processes


def _host_beside(text: str, baseline: str, threads: int = 1, race: Race | None = None) -> TrialHost:
    toolchain = find_toolchain()
    return TrialHost(
        Problem.parse(text),
        threads=threads,
        baseline=baseline,
        toolchain=toolchain,
        seed=1,
        scalar_build=lambda: build_planted(toolchain),
        races=(race,) if race else (Race(),),
    )


def _in_layouts(*sizes: str) -> list[ParameterSet]:
    """Return sizes in each layout of w; in one of them each, in turn, in the quick stage."""
    return [
        pytest.param(size, layout, marks=() if turn % 2 == at else pytest.mark.proof)
        for turn, size in enumerate(sizes)
        for at, layout in enumerate(("nk", "kn"))
    ]


_STEPS_OF_FLOATS = sorted(
    name for name, kind in STEP_KINDS.items() if kind.operand_type is not DType.S32
)
_CHAINS_OF_FLOATS = [
    "bias+gelu_erf+add",
    "scale+bias+relu",
    "clamp:-0.5:0.25+leaky_relu:0.3",
    "add+mul+bias+add",
]
_EPILOGUES_OF_FLOATS = ["none", *_STEPS_OF_FLOATS, *_CHAINS_OF_FLOATS]
# Of a library that takes seconds to load, which each of these tests does anew.
_FEW_EPILOGUES_OF_FLOATS = [
    "none",
    *(
        "+".join(_STEPS_OF_FLOATS[first : first + 3])
        for first in range(0, len(_STEPS_OF_FLOATS), 3)
    ),
    *_CHAINS_OF_FLOATS,
]


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize("epilogue", _EPILOGUES_OF_FLOATS)
def test_onednn_computes_every_epilogue(epilogue: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(f"f32 19x37x23 nk {epilogue}", baseline="onednn").startswith(
        "onednn 3."
    )


# Layers of bytes: as integers, dequantised, with an activation, per row, and quantised again.
_LAYERS_OF_BYTES = [
    "u8_s8_s32_s32 19x37x23 nk x_zero_point",
    "u8_s8_s32_f32 19x37x23 nk none",
    "s8_s8_s32_f32 19x37x23 kn scale+channel_scale+bias+relu",
    "u8_s8_s32_f32 19x37x23 nk x_zero_point+scale+bias+gelu_erf+add",
    "s8_s8_s32_f32 19x37x23 nk row_scale+channel_scale+bias",
    "s8_s8_s32_s8 19x37x23 nk channel_scale+y_zero_point",
    "u8_s8_s32_u8 19x37x23 nk scale+channel_scale+bias+relu+scale+y_zero_point",
]


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize("text", [*_LAYERS_OF_BYTES, "u8_s8_s32_bf16 19x37x23 nk scale+silu"])
def test_onednn_computes_layers_of_bytes(text: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(text, baseline="onednn").startswith("onednn 3.")


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize(
    "text",
    [
        "u8_s8_s32_f32 19x37x23 nk x_row_zero_point+row_scale",
        "s8_s8_s32_bf16 19x37x23 kn x_row_zero_point+row_scale+channel_scale+bias",
        "u8_s8_s32_s32 19x37x23 nk x_zero_point+x_row_zero_point",
        "f16 19x37x23 nk bias+silu",
        "f32_f32_f32_bf16 19x37x23 kn gelu_erf",
    ],
)
def test_what_onednn_lacks_is_done_by_passes(text: str, libraries: Libraries) -> None:
    found = libraries.baseline_of(text, baseline="onednn")

    assert found.startswith("onednn 3.")
    assert found.endswith(" + pass")


@pytest.mark.baseline("onednn")
def test_plain_weights_are_right_although_they_are_rounded(libraries: Libraries) -> None:
    """Zero points of y are rounded: a weight rounded to bf16 moves some results by a whole one."""
    found = libraries.baseline_of(
        "bf16_s4_f32_bf16 569x924x7 kn:gk y_zero_point", baseline="onednn"
    )

    assert found.endswith(" with weights of bf16")


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize("dtype", ["int8", "f32", "bf16"])
def test_no_reference_implementation_is_a_baseline(dtype: str) -> None:
    with _host_beside(f"{dtype} 32x256x256 nk row_scale+bias", "onednn") as host:
        (implementation,) = host.baselines().implementations.values()

        fast = ("brg",) if IsaFeature.AVX512_VNNI in detect_cpu().isa else ("brg", "gemm:jit:")
        assert implementation.startswith(fast)
        assert host.baselines().call_s < 0.005  # 27 ms by the reference implementation


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize(
    ("sizes", "layout"), _in_layouts("1x64x33", "64x1x33", "5x5x1", "0x4x4", "4x0x4")
)
def test_onednn_computes_every_layout(sizes: str, layout: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(f"f32 {sizes} {layout} bias", baseline="onednn").startswith(
        "onednn 3."
    )


@pytest.mark.baseline("openblas")
@pytest.mark.parametrize(
    ("sizes", "layout"), _in_layouts("19x37x23", "1x37x23", "19x1x23", "1x1x1", "1x4x0")
)
def test_openblas_computes_a_layer(sizes: str, layout: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f32 {sizes} {layout} bias+relu", baseline="openblas")

    assert text.startswith("openblas ")
    assert text.endswith(" + pass")


@pytest.mark.baseline("openblas")
@pytest.mark.parametrize("text", ["bf16 19x37x23 nk gelu_tanh", "f16_f16_f32_f32 19x37x23 kn"])
def test_openblas_computes_in_f32_what_it_has_no_type_for(text: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(text, baseline="openblas").endswith(" + pass")


@pytest.mark.baseline("onednn")
@pytest.mark.baseline("openblas")
@pytest.mark.parametrize(
    ("threads", "regime"), [(1, Regime.HOT), (2, Regime.HOT), (1, Regime.COLD_WEIGHTS)]
)
def test_installed_libraries_are_raced(threads: int, regime: Regime) -> None:
    problem, race = "f32 64x96x64 nk bias+relu", Race(limit_s=0.1, regime=regime)
    with _host_beside(problem, AUTO, threads, race) as host:
        found = host.baselines(regime)
        assert {one.package.split()[0] for one in found.raced} >= {"onednn-cpu-gomp", "numpy"}
        assert found.text == found.raced[0].baseline
        assert all(one.call_ns > 0 or one.lacked_time for one in found.raced)
        assert found.left_out == {}


@pytest.mark.baseline("mkl")
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_mkl_computes_the_product(
    dtype: str, layout: str, threads: int, libraries: Libraries
) -> None:
    text = libraries.baseline_of(
        f"{dtype} 19x37x23 {layout} bias+relu", baseline="mkl", threads=threads
    )

    assert text.startswith("mkl ")


@pytest.mark.baseline("mkl")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_mkl_is_right_with_each_copy_of_cold_weights(dtype: str) -> None:
    """What it packs begins at a huge page: its bytes are no weights at most other addresses."""
    race = Race(limit_s=0.1, regime=Regime.COLD_WEIGHTS)
    with _host_beside(f"{dtype} 32x768x768 nk bias", "mkl", race=race) as host:
        assert host.baselines(Regime.COLD_WEIGHTS).text.startswith("mkl ")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize("problem", ["f32 19x37x23 nk bias+relu", "matmul f32 19x37x23 kn none"])
def test_mkl_of_pytorch_stands_in_for_its_wheel(problem: str, no_mkl: Libraries) -> None:
    assert no_mkl.baseline_of(problem, baseline="mkl").startswith("mkl torch-")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize(
    ("problem", "threads", "told"),
    [("bf16 19x37x23", 1, "for float32 alone"), ("f32 19x37x23", 2, "on one thread alone")],
)
def test_mkl_of_pytorch_says_what_it_is_not_called_for(
    problem: str, threads: int, told: str, no_mkl: Libraries
) -> None:
    with pytest.raises(BaselineMissing, match=told):
        no_mkl.baseline_of(problem, baseline="mkl", threads=threads)


@pytest.mark.baseline("mkl")
@pytest.mark.parametrize("y", ["s32", "f32", "u8"])
def test_mkl_computes_the_product_of_bytes(y: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"u8_s8_s32_{y} 19x37x23", baseline="mkl")

    assert text.startswith("mkl ")


@pytest.mark.baseline("libxsmm")
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_libxsmm_computes_the_product(layout: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f32 19x37x23 {layout} bias+relu", baseline="libxsmm")

    assert text.startswith("libxsmm 1.")


@pytest.mark.baseline("libxsmm")
def test_libxsmm_refuses_what_is_not_small(libraries: Libraries) -> None:
    with pytest.raises(BaselineMissing, match="small products"):
        libraries.baseline_of("f32 65x64x64", baseline="libxsmm")


@pytest.mark.baseline("onnxruntime")
@pytest.mark.parametrize("epilogue", _FEW_EPILOGUES_OF_FLOATS)
def test_onnx_runtime_computes_every_epilogue(epilogue: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f32 19x37x23 kn {epilogue}", baseline="onnxruntime")

    assert text.startswith("onnxruntime ")


@pytest.mark.baseline("onnxruntime")
@pytest.mark.parametrize("text", _LAYERS_OF_BYTES)
def test_onnx_runtime_computes_layers_of_bytes(text: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(text, baseline="onnxruntime").startswith("onnxruntime ")


@pytest.mark.baseline("onnxruntime")
def test_onnx_runtime_gets_signed_bytes_as_unsigned_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saturates signed weights where the CPU adds in 16 bits, and has no fast signed x."""
    monkeypatch.setenv("GEMM_TUNER_ISA", "avx2,fma")

    with _host_beside("s8_s8_s32_f32 19x37x23 nk x_zero_point+scale", "onnxruntime") as host:
        (told,) = host.baselines().implementations.values()

    assert told == "MatMulIntegerToFloat: x and w as u8"


@pytest.mark.baseline("onnxruntime")
@pytest.mark.parametrize("epilogue", ["bias+gelu_erf+add", "bias+clamp:-0.5:0.25"])
def test_onnx_runtime_converts_half_precision(epilogue: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f16 19x37x23 nk {epilogue}", baseline="onnxruntime")

    assert text.startswith("onnxruntime ")


@pytest.mark.baseline("onnxruntime")
def test_onnx_runtime_refuses_what_it_has_no_operator_for(libraries: Libraries) -> None:
    with pytest.raises(BaselineMissing, match="does not compute bf16"):
        libraries.baseline_of("bf16 19x37x23", baseline="onnxruntime")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize("epilogue", _FEW_EPILOGUES_OF_FLOATS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_torch_computes_every_epilogue(dtype: str, epilogue: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"{dtype} 19x37x23 nk {epilogue}", baseline="torch")

    assert text.startswith("torch ")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize("text", _LAYERS_OF_BYTES[1:])
def test_torch_computes_layers_of_bytes(text: str, libraries: Libraries) -> None:
    need_whole_sums_of_bytes()

    assert libraries.baseline_of(text, baseline="torch").startswith("torch ")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize("layer", ["u8_s8_s32_s32 9x7x3", "u8_s8_s32_u8 9x7x3 nk scale+sigmoid"])
def test_torch_refuses_what_its_quantised_layer_cannot_do(layer: str, libraries: Libraries) -> None:
    with pytest.raises(BaselineMissing, match="PyTorch"):
        libraries.baseline_of(layer, baseline="torch")


@pytest.mark.baseline("torch-onednn")
def test_the_onednn_inside_torch_computes_a_layer() -> None:
    with _host_beside("f32 19x37x23 nk bias+gelu_erf+add", "torch-onednn", threads=2) as host:
        assert host.baselines().text.startswith("torch-onednn ")


@pytest.mark.baseline("zentorch")
@pytest.mark.parametrize("epilogue", ["bias+silu+mul", "gelu_erf+bias"])
def test_zentorch_computes_a_layer(epilogue: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f32 19x37x23 kn {epilogue}", baseline="zentorch")

    assert text.startswith("zentorch ")


@pytest.mark.baseline("openvino")
@pytest.mark.parametrize("epilogue", _FEW_EPILOGUES_OF_FLOATS)
def test_openvino_computes_every_epilogue(epilogue: str, libraries: Libraries) -> None:
    text = libraries.baseline_of(f"f32 19x37x23 nk {epilogue}", baseline="openvino", threads=2)

    assert text.startswith("openvino ")


@pytest.mark.baseline("openvino")
def test_openvino_is_called_in_float32_only(libraries: Libraries) -> None:
    with pytest.raises(BaselineMissing, match="not in bf16"):
        libraries.baseline_of("bf16 19x37x23", baseline="openvino")


@pytest.mark.baseline("torch-weights")
@pytest.mark.parametrize(
    "text",
    [
        "f32_s8 19x48x64 nk:gk bias+relu",
        "bf16_s8 19x32x96 kn:gk none",
        "f32_s4 5x64x128 nk:g32 gelu_erf",
        "f32_u4 19x32x256 kn:g128 bias+add",
        "bf16_s4 19x48x128 nk:g64 bias",
        "bf16_u4 1x64x256 nk:g128 silu",
    ],
)
def test_torch_computes_with_quantised_weights(text: str, libraries: Libraries) -> None:
    assert libraries.baseline_of(text, baseline="torch-weights").startswith("torch-weights ")


@pytest.mark.baseline("torch-weights")
@pytest.mark.baseline("onnxruntime")
def test_torch_takes_part_in_the_race_of_quantised_weights() -> None:
    with _host_beside("bf16_s4 1x64x256 nk:g128 none", AUTO, race=Race()) as host:
        times = {one.baseline.partition(" ")[0]: one.call_ns for one in host.baselines().raced}
        reasons = {one.package.split()[0]: one.reason for one in host.baselines().raced}

    assert times["torch-weights"] > 0
    assert "does not compute bf16" in reasons["onnxruntime"]


@pytest.mark.baseline("torch-weights")
@pytest.mark.parametrize(
    ("types", "operator"),
    [("bf16_s8 1x32x64 nk:gk", "int8pack"), ("bf16_s4 1x32x64 nk:g32", "int4pack")],
)
def test_the_operator_of_torch_is_told(types: str, operator: str, libraries: Libraries) -> None:
    assert operator in libraries.implementation_of(f"{types} none", "torch-weights")


@pytest.mark.baseline("torch-weights")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32 4x32x32 nk none", "weights are not quantised"),
        ("bf16_s4_f32_f32 4x32x32 nk:g32 none", "another type than x"),
        ("f32_s4 4x32x48 nk:g32 none", "groups of 4-bit weights"),
        ("f32_s4 4x33x32 nk:g32 none", "n is a multiple of 16"),
        ("f32_s8 4x32x64 nk:g32 none", "one scale per column"),
        ("f32_u8 4x32x64 nk:gk none", "are signed"),
        ("bf16_s8 4x32x33 nk:gk none", "k is a multiple of 32"),
    ],
)
def test_torch_refuses_weights_that_its_operators_do_not_take(
    text: str, reason: str, libraries: Libraries
) -> None:
    with pytest.raises(BaselineMissing, match=reason):
        libraries.baseline_of(text, baseline="torch-weights")


@pytest.mark.baseline("torch-inductor")
def test_torch_inductor_computes_a_layer() -> None:
    with _host_beside("f32 19x37x23 nk bias+gelu_erf+add", "torch-inductor", threads=2) as host:
        assert host.baselines().text.startswith("torch-inductor ")


_OF_ACTIVATIONS = {
    "onednn": (
        "f32 19x37x23 nk scale+add",
        "f32 1x37x23 kn none",
        "bf16 19x37x23 kn scale",
        "int8 19x37x23 nk scale",
        "u8_s8_s32_f32 19x37x23 kn x_row_zero_point+row_scale",
    ),
    "openblas": (
        "f32 19x37x23 nk scale+add",
        "f32 1x37x23 kn none",
        "f32 1x37x23 nk none",
        "f32 19x1x23 kn none",
        "bf16 19x37x23 kn scale",
    ),
    "mkl": (
        "f32 19x37x23 nk scale+add",
        "f32 19x37x23 kn none",
        "bf16 19x37x23 kn scale",
        "u8_s8_s32_f32 19x37x23 nk x_zero_point",
        "u8_s8_s32_f32 19x37x23 kn x_row_zero_point",
    ),
    "libxsmm": ("f32 19x37x23 kn none",),
    "torch": (
        "f32 19x37x23 nk scale",
        "f32 19x37x23 kn scale+add+relu",
        "f32 19x37x23 nk bias+scale",
        "bf16 19x37x23 kn none",
    ),
    "zentorch": ("f32 19x37x23 nk scale+add", "f32 19x37x23 kn bias"),
    "onnxruntime": (
        "f32 19x37x23 nk scale+add",
        "f32 1x37x23 kn bias+relu",
        "f16 19x37x23 kn none",
        "int8 19x37x23 nk scale",
        "s8_s8_s32_f32 19x37x23 kn x_zero_point+scale+bias",
        "u8_s8_s32_s32 19x37x23 nk none",
    ),
    "openvino": ("f32 19x37x23 nk scale+add", "f32 1x37x23 kn bias+relu"),
}
# Of each library the first has a process of its own, in the sandbox.
_ALONE, _TOGETHER = (
    [
        pytest.param(name, f"matmul {text}", marks=pytest.mark.baseline(name))
        for name, texts in _OF_ACTIVATIONS.items()
        for text in texts[chosen]
    ]
    for chosen in (slice(1), slice(1, None))
)


@pytest.mark.parametrize(("baseline", "text"), _ALONE)
def test_libraries_multiply_two_activations_in_the_sandbox(baseline: str, text: str) -> None:
    with _host_beside(text, baseline) as host:
        assert host.baselines().text.startswith(baseline)


@pytest.mark.parametrize(("baseline", "text"), _TOGETHER)
def test_libraries_multiply_two_activations(baseline: str, text: str, libraries: Libraries) -> None:
    found = libraries.baseline_of(text, baseline=baseline)

    assert found.startswith(baseline)


def test_a_library_that_packs_ahead_is_no_baseline_of_activations(libraries: Libraries) -> None:
    with pytest.raises(
        BaselineMissing, match="torch-onednn is not called for the operation 'matmul'"
    ):
        libraries.baseline_of("matmul f32 19x37x23 nk none", baseline="torch-onednn")


@pytest.mark.baseline("libxsmm")
def test_libxsmm_multiplies_no_transposed_activations(libraries: Libraries) -> None:
    with pytest.raises(BaselineMissing, match=r"no kernel for a w of \(n, k\)"):
        libraries.baseline_of("matmul f32 19x37x23 nk none", baseline="libxsmm")


@pytest.mark.baseline("onnxruntime")
def test_onnx_runtime_is_raced_for_two_activations() -> None:
    with _host_beside("matmul int8 19x37x23 kn scale", AUTO, race=Race()) as host:
        times = {one.baseline.partition(" ")[0]: one.call_ns for one in host.baselines().raced}

    assert times["onnxruntime"] > 0
