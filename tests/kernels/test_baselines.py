import pytest
from planted import build_planted

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem


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
