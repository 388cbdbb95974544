"""The command that the README begins with."""

import pytest

from gemm_tuner.cli.main import run


def test_quickstart_tunes_serves_fetches_and_calls(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["quickstart", "--budget", "1s"])

    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert code == 0, captured.err
    assert any(line.endswith("  baseline") for line in lines)
    assert "checked against NumPy in float64: every element is within its error bound" in lines
    assert any(line.startswith("called from Python: ") for line in lines)
