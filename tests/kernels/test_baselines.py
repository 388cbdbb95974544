import pytest
from planted import build_planted

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing


def _baseline_of(text: str, *, baseline: str, threads: int = 1) -> str:
    """Return the name of a baseline that was found to be right on a problem."""
    toolchain = find_toolchain()
    with TrialHost(
        Problem.parse(text),
        threads=threads,
        baseline=baseline,
        toolchain=toolchain,
        seed=1,
        scalar_build=build_planted(toolchain),
    ) as host:
        return host.baseline_text


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize(
    "epilogue",
    [
        "none",
        *sorted(STEP_KINDS),
        "bias+gelu_erf+add",
        "scale+bias+relu",
        "clamp:-0.5:0.25+leaky_relu:0.3",
        "add+mul+bias+add",
    ],
)
def test_onednn_computes_every_epilogue(epilogue: str) -> None:
    assert _baseline_of(f"f32 19x37x23 nk {epilogue}", baseline="onednn").startswith("onednn 3.")


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize("sizes", ["1x64x33", "64x1x33", "5x5x1", "0x4x4", "4x0x4"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_onednn_computes_every_layout(sizes: str, layout: str) -> None:
    assert _baseline_of(f"f32 {sizes} {layout} bias", baseline="onednn").startswith("onednn 3.")


@pytest.mark.baseline("openblas")
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_openblas_computes_the_product(layout: str) -> None:
    text = _baseline_of(f"f32 19x37x23 {layout} bias+relu", baseline="openblas")

    assert text.startswith("openblas ")


@pytest.mark.baseline("onednn")
def test_onednn_is_chosen_first() -> None:
    assert _baseline_of("f32 5x7x3 nk bias+relu", baseline="auto", threads=2).startswith("onednn")


@pytest.mark.baseline("mkl")
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_mkl_computes_the_product(dtype: str, layout: str, threads: int) -> None:
    text = _baseline_of(f"{dtype} 19x37x23 {layout} bias+relu", baseline="mkl", threads=threads)

    assert text.startswith("mkl ")


@pytest.mark.baseline("libxsmm")
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_libxsmm_computes_the_product(layout: str) -> None:
    text = _baseline_of(f"f32 19x37x23 {layout} bias+relu", baseline="libxsmm")

    assert text.startswith("libxsmm 1.")


@pytest.mark.baseline("libxsmm")
def test_libxsmm_refuses_what_is_not_small() -> None:
    with pytest.raises(BaselineMissing, match="small products"):
        _baseline_of("f32 65x64x64", baseline="libxsmm")


_EPILOGUES_OF_FLOATS = [
    "none",
    *sorted({"add", "bias", "clamp", "gelu_erf", "gelu_tanh", "hardswish", "leaky_relu", "mul"}),
    *sorted({"relu", "scale", "sigmoid", "silu", "tanh"}),
    "bias+gelu_erf+add",
    "scale+bias+relu",
    "clamp:-0.5:0.25+leaky_relu:0.3",
    "add+mul+bias+add",
]


@pytest.mark.baseline("onnxruntime")
@pytest.mark.parametrize("epilogue", _EPILOGUES_OF_FLOATS)
def test_onnx_runtime_computes_every_epilogue(epilogue: str) -> None:
    text = _baseline_of(f"f32 19x37x23 kn {epilogue}", baseline="onnxruntime")

    assert text.startswith("onnxruntime ")


@pytest.mark.baseline("onnxruntime")
def test_onnx_runtime_refuses_what_it_has_no_operator_for() -> None:
    with pytest.raises(BaselineMissing, match="does not compute bf16"):
        _baseline_of("bf16 19x37x23", baseline="onnxruntime")


@pytest.mark.baseline("torch")
@pytest.mark.parametrize("epilogue", _EPILOGUES_OF_FLOATS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_torch_computes_every_epilogue(dtype: str, epilogue: str) -> None:
    text = _baseline_of(f"{dtype} 19x37x23 nk {epilogue}", baseline="torch")

    assert text.startswith("torch ")


@pytest.mark.baseline("torch-inductor")
def test_torch_inductor_computes_a_layer() -> None:
    text = _baseline_of("f32 19x37x23 nk bias+gelu_erf+add", baseline="torch-inductor", threads=2)

    assert text.startswith("torch-inductor ")
