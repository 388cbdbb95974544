"""`gemm-tuner collect`: the products of a script."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.cli.arguments import script as command
from gemm_tuner.cli.main import WRONG_USAGE, run

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

MODEL = """
import sys
import torch
from model_parts import Model
rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2
model = Model()
if __name__ == "__main__":
    with torch.no_grad():
        model(torch.ones(rows, 8))
        model.to(torch.bfloat16)(torch.ones(rows, 8, dtype=torch.bfloat16))
    model.float()(torch.ones(rows, 8, requires_grad=True)).sum().backward()
"""
PARTS = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 5, bias=False))
    def forward(self, x):
        y = self.layers(x)
        return y @ y.T
"""


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    (folder / "model_parts.py").write_text(PARTS)
    return str(path)


def test_the_layers_of_a_script_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "layers.csv"

    assert run(["collect", _script(tmp_path, MODEL), "--out", str(out), "--", "3"]) == 0

    printed = capsys.readouterr().out
    assert "Model.layers.0.weight" in printed
    assert "none: matmul f32 3x3x5 nk none" in printed
    assert f"{out} holds 3 products of f32" in printed
    with out.open() as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    names = ("m", "n", "k", "epilogue", "w_layout", "operation")
    assert {tuple(row[name] for name in names) for row in rows.values()} == {
        ("3", "5", "8", "bias", "nk", "linear"),
        ("3", "5", "5", "none", "nk", "linear"),
        ("3", "3", "5", "none", "nk", "matmul"),
    }
    assert run(["collect", _script(tmp_path, MODEL), "--out", str(out), "--dtype", "bf16"]) == 0
    assert out.read_text().count("2,5,8,bias") == 1


def test_a_place_for_no_layers_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script(tmp_path, "print('it runs')")

    assert run(["collect", script, "--out", f"{tmp_path}/no/layers.csv"]) == WRONG_USAGE

    told = capsys.readouterr()
    assert f"{tmp_path}/no/layers.csv cannot be written: there is no folder" in told.err
    assert not told.out


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["collect", _script(tmp_path, MODEL), "--out", "/dev/full"]) == WRONG_USAGE
    assert "/dev/full cannot be written: No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise ValueError('of mine')", 1, r"failed at .*script.py:\d+ with ValueError: of mine"),
        (r"raise ValueError('one\ntwo')", 1, r"with ValueError: one; what [^\n]*\n$"),
        ("raise KeyboardInterrupt", 0, "interrupted"),
        ("sys.exit(3)", 1, "ended with exit code 3"),
        ("sys.exit(0)", 0, ""),
    ],
)
def test_what_ran_before_an_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, code: int, told: str
) -> None:
    script = _script(tmp_path, f"{MODEL}\n{end}\nmodel(torch.ones(77, 8))")

    assert run(["collect", script]) == code

    out, err = capsys.readouterr()
    assert "2x5x8" in out
    assert "77x5x8" not in out
    assert err == "" if not told else re.search(told, err)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import torch", 2, "no product of matrices ran"),
        ("this is no Python", 2, "SyntaxError"),
        (None, 2, "is no file"),
    ],
)
def test_scripts_without_products_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: int, told: str
) -> None:
    script = str(tmp_path / "missing.py") if text is None else _script(tmp_path, text)

    assert run(["collect", script]) == code

    assert told in capsys.readouterr().err


def test_without_pytorch_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _name: None)

    assert run(["collect", _script(tmp_path, MODEL)]) == 3

    assert 'pip install "gemm-tuner[torch]"' in capsys.readouterr().err
