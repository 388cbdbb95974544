"""The command that the README begins with."""

from pathlib import Path

import pytest

from gemm_tuner.cli.main import run
from gemm_tuner.cli.quickstart import _service
from gemm_tuner.errors import ServiceUnreachable


@pytest.mark.proof
def test_quickstart_tunes_serves_fetches_and_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The keys of another service, which its user pins for other programs.
    monkeypatch.setenv("GEMM_TUNER_KEYS", str(tmp_path / "keys-of-another-service.json"))
    monkeypatch.setenv("GEMM_TUNER_PORT", "8000")  # and where it listens

    code = run(["quickstart", "--budget", "1s"])

    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert code == 0, captured.err
    assert any(line.endswith("  baseline") for line in lines)
    assert any(line.startswith("The service is up at unix:") for line in lines)
    assert "checked against NumPy in float64: every element is within its error bound" in lines
    assert any(line.startswith("called from Python: ") for line in lines)


def test_a_service_that_does_not_start_is_heard() -> None:
    with (
        pytest.raises(ServiceUnreachable, match=r"did not become ready and said .*/proc/none"),
        _service("sqlite:////proc/none/store.sqlite3"),
    ):
        pass
