"""A script of a user that ends in an odd way keeps what it computed."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from gemm_tuner.cli.arguments.script import run_script

UNSAID = "class Unsaid(Exception):\n    def __str__(self): raise RuntimeError\nraise Unsaid"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise BaseException('base')", "with BaseException: base;"),
        ("raise BaseExceptionGroup('several', [KeyboardInterrupt()])", "BaseExceptionGroup"),
        (UNSAID, "with Unsaid: a message that cannot be shown;"),
        ("import sys; sys.exit(True)", "ended with exit code 1;"),
        ("import sys; sys.exit('enough')", "ended with enough;"),
    ],
)
def test_what_was_computed_counts(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)

    assert run_script(script, []) == 1

    err = capsys.readouterr().err
    assert told in err
    assert "what it computed until then counts" in err
