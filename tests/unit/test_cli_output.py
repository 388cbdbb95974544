"""Tables: plain in a pipe, folded in a terminal."""

import json
import re
import sys
from unicodedata import bidirectional, category

import pytest
from rich.console import Console

from gemm_tuner.cli.terminal import output
from gemm_tuner.cli.terminal.output import print_json, print_table
from gemm_tuner.domain.printable import harmless

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
    terminal = Console(force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(output, "results", lambda: terminal)

    print_table("Times", COLUMNS, ROWS)

    lines = _BOLD.sub("", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 60
    assert any("1.24 µs" in line for line in lines)
    assert sum(line.count("word") for line in lines) == 60


def test_a_terminal_too_narrow_for_the_figures_loses_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(force_terminal=True, width=20, color_system=None)
    monkeypatch.setattr(output, "results", lambda: terminal)

    print_table("Times", (">threads", ">time", "bound by"), [("64", "1.24 µs", "memory")])

    said = _BOLD.sub("", capsys.readouterr().out)
    assert all(word in said for word in ("threads", "64", "1.24 µs", "memory"))


def test_a_table_without_rows_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Times", COLUMNS, [])

    assert capsys.readouterr().out == "Times\n  layer   time   why\n"


def test_what_a_terminal_would_obey_is_spelled_in_tables_and_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table("Times", ("layer",), [("\x1b[31mred\x9b\u202e\u2028",)])
    print_json({"layer": "\x1b[31mred\x9b\x7f\u202e"})

    said = capsys.readouterr().out
    assert r"\x1b[31mred\x9b\u202e\u2028" in said
    assert r"\u001b[31mred\u009b\u007f" in said
    assert not {"\x1b", "\x9b", "\x7f", "\u202e", "\u2028"} & set(said)


def test_what_nobody_sees_is_spelled() -> None:
    unseen = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        # Unlike the others that format, the signs of some scripts are drawn.
        if category(character) == "Cf" and bidirectional(character) not in {"AN", "AL", "L"}
    ] + list("\u3164\ufe0f\u034f\u115f")

    assert not [one for one in unseen if one in harmless(f"a{one}b")]
    assert harmless("a\xad\U000e0041") == r"a\u00ad\udb40\udc41"
    assert json.loads(f'"{harmless(chr(0xE0041))}"') == "\U000e0041"


def test_a_line_break_in_a_cell_makes_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Changes", ("what", "why"), [("revoked", "wrong\nnobody   did this")])

    assert capsys.readouterr().out.count("\n") == 3
