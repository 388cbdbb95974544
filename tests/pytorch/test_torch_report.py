from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

told: Any = pytest.importorskip("gemm_tuner.torch.report")


def _layer(name: str, reason: str, *, is_taken: bool = False) -> Any:  # noqa: ANN401 - see above
    return told.LayerReport(
        name=name, problem="f32 8x32x16 nk bias", rows=(8,), is_taken=is_taken, reason=reason
    )


def test_a_reason_of_several_layers_is_told_once() -> None:
    missing = "no kernel is known for this problem."
    report = told.Report(
        [
            _layer("q", missing),
            _layer("up", "tuned: 1.2 times as fast.", is_taken=True),
            _layer("k", missing),
        ]
    )

    assert str(report).splitlines() == [
        "1 of 3 layers call tuned kernels",
        f"left, 2 layers: {missing}",
        "  q: f32 8x32x16 nk bias",
        "  k: f32 8x32x16 nk bias",
        "up: taken: f32 8x32x16 nk bias: tuned: 1.2 times as fast.",
    ]
    assert [one.reason for one in report.left] == [missing, missing]
