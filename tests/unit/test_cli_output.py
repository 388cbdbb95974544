"""Tables: plain in a pipe, folded in a terminal."""

import re

import pytest
from rich.console import Console

from gemm_tuner.cli import output
from gemm_tuner.cli.output import print_table

_BOLD = re.compile(r"\x1b\[\d*m")
COLUMNS = ("layer", ">time", "why")
ROWS = [("a [bold] :smile: name", "1.24 µs", "word " * 60), ("b", "950 ns", "")]


def test_a_table_in_a_pipe_is_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Times", COLUMNS, ROWS)

    assert capsys.readouterr().out.splitlines() == [
        "Times",
        "  layer                      time   why",
        f"  a [bold] :smile: name   1.24 µs   {('word ' * 60).rstrip()}",
        "  b                        950 ns",
    ]


def test_a_table_in_a_terminal_is_folded_but_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        output, "RESULTS", Console(force_terminal=True, width=60, color_system=None)
    )

    print_table("Times", COLUMNS, ROWS)

    lines = _BOLD.sub("", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 60
    assert any("1.24 µs" in line for line in lines)
    assert sum(line.count("word") for line in lines) == 60


def test_a_table_without_rows_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Times", COLUMNS, [])

    assert capsys.readouterr().out == "Times\n  layer   time   why\n"
