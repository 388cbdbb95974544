"""How PyTorch is called as a baseline; skipped where it is not installed."""

from typing import Any

import pytest

pytestmark = pytest.mark.proof
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from gemm_tuner.arrays.quantise import read_elements  # noqa: E402 - after PyTorch was found
from gemm_tuner.bench.baselines.torch_eager import TorchEager  # noqa: E402
from gemm_tuner.bench.baselines.torch_onednn import TorchOneDnn  # noqa: E402
from gemm_tuner.bench.baselines.torch_weights import TorchWeightOnly  # noqa: E402
from gemm_tuner.bench.inputs import InputKind, make_inputs  # noqa: E402
from gemm_tuner.bench.regimes import WeightCopies  # noqa: E402
from gemm_tuner.bench.workload import Workload, make_workload  # noqa: E402
from gemm_tuner.domain.dtype import DType  # noqa: E402
from gemm_tuner.domain.epilogue import STEP_KINDS  # noqa: E402
from gemm_tuner.domain.problem import Problem  # noqa: E402
from gemm_tuner.errors import BaselineMissing  # noqa: E402


@pytest.mark.parametrize("text", ["bf16_s4 2x32x64 nk:g32 none", "f32_s8 2x32x64 nk:gk bias"])
def test_weights_of_many_copies_are_packed_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse(text)
    packings: list[object] = []

    def count(*arguments: Any) -> Any:  # noqa: ANN401 - those of what it stands for
        packings.append(arguments)
        return read_elements(*arguments)

    monkeypatch.setattr("gemm_tuner.bench.baselines.torch_weights.read_elements", count)
    workload = make_workload(problem, make_inputs(problem, InputKind.NORMAL, 1), threads=1)
    runner = TorchWeightOnly().prepare(workload)
    weights = WeightCopies(runner, 3, seed=0)

    runner.sample(weights.struct, warm_up_calls=0, timed_calls=3)

    results = torch.stack([call() for call in runner._calls])
    assert len(packings) == 1
    assert len(results) == 3
    assert torch.equal(results, results[:1].expand_as(results))


def workload_of(text: str) -> Workload:
    """Return a workload of one thread, of random inputs."""
    problem = Problem.parse(text)
    return make_workload(problem, make_inputs(problem, InputKind.NORMAL, 1), threads=1)


def computed_by(baseline: TorchEager | TorchOneDnn, text: str) -> Any:  # noqa: ANN401 - an array
    """Return what a baseline computes."""
    workload = workload_of(text)
    runner = baseline.prepare(workload)
    weights = WeightCopies(runner, 1, seed=0)
    runner.sample(weights.struct, warm_up_calls=0, timed_calls=1)
    return workload.y


@pytest.mark.parametrize(
    "epilogue",
    [
        "none",
        "scale+bias",
        *(
            f"bias+{name}"
            for name, kind in STEP_KINDS.items()
            if kind.operand_type is not DType.S32
        ),
        "clamp:-0.5:0.25+leaky_relu:0.3",
        "leaky_relu:0.3+add+mul",
    ],
)
def test_the_onednn_inside_pytorch_computes_what_pytorch_does(epilogue: str) -> None:
    """It fuses the first step alone, if that is a function or a matrix that it knows."""
    text = f"f32 19x37x23 kn {epilogue}"

    y = computed_by(TorchOneDnn(), text)

    torch.testing.assert_close(
        torch.from_numpy(y), torch.from_numpy(computed_by(TorchEager(), text)), rtol=1e-4, atol=1e-5
    )


def test_the_onednn_inside_pytorch_refuses_types_that_it_lacks_here() -> None:
    with pytest.raises(BaselineMissing, match="does not compute u8_s8"):
        TorchOneDnn().check_problem(Problem.parse("u8_s8_s32_f32 19x37x23"))
    for dtype, has in (
        ("bf16", torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        ("f16", torch.ops.mkldnn._is_mkldnn_fp16_supported()),
    ):
        workload = workload_of(f"{dtype} 19x37x23 nk bias+relu")
        if has:
            assert TorchOneDnn().prepare(workload)
        else:
            with pytest.raises(BaselineMissing, match="on this CPU"):
                TorchOneDnn().prepare(workload)
