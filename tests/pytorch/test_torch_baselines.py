"""How PyTorch is called as a baseline; skipped where it is not installed."""

from typing import Any

import pytest

pytestmark = pytest.mark.proof
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from gemm_tuner.arrays.quantise import read_elements  # noqa: E402 - after PyTorch was found
from gemm_tuner.bench.baselines.torch_weights import TorchWeightOnly  # noqa: E402
from gemm_tuner.bench.inputs import InputKind, make_inputs  # noqa: E402
from gemm_tuner.bench.regimes import WeightCopies  # noqa: E402
from gemm_tuner.bench.workload import make_workload  # noqa: E402
from gemm_tuner.domain.problem import Problem  # noqa: E402


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
