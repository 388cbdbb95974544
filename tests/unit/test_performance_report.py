import csv
import json
from pathlib import Path
from typing import Any

import performance
import publish
import pytest

SMALL_FLOP = 10_000_000


def _layers(name: str) -> list[dict[str, str]]:
    with (publish.ROOT / publish.SHAPES / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _beside(baseline: str, low: float, median: float, high: float) -> dict[str, Any]:
    ratio = {"low": low, "median": median, "high": high, "of_minimums": median}
    return {"baseline": baseline, "computes": "layer", "ratio": ratio}


def _row(
    name: str, *baselines: dict[str, Any], kernel: str = "k", regime: str = "hot", threads: int = 1
) -> dict[str, Any]:
    return {
        "name": name,
        "problem": "f32 8x16x32 nk bias",
        "threads": threads,
        "regime": regime,
        "decision": "tie",
        "served": True,
        "candidate": kernel,
        "median_ns": 100.0,
        "share_of_roofline": 0.5,
        "refuted": False,
        "baselines": list(baselines),
        "toolchain": "gcc 12.2",
        "conditions": {"kernel_release": "6"},
    }


def _report(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    notes: dict[str, dict[str, str]],
) -> tuple[int, str, str]:
    """Return the exit code, the report and the messages."""
    document = {"cpu": "a CPU", "cpu_key": "x", "generator": "1 abc", "date": "2026-11-20"}
    (tmp_path / "1.json").write_text(json.dumps(document | {"layers": rows}))
    (tmp_path / performance.COMMANDS).write_text("gemm-tuner bench\n")
    written = tmp_path / "notes"
    written.write_text(json.dumps(notes))
    monkeypatch.setattr(performance, "NOTES", written)
    code = performance.main(tmp_path)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_notes_are_shown_where_they_fit_and_told_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = _beside("blas 3", 0.90, 0.95, 0.97)
    rows = [
        _row("fits", behind),
        _row("other", behind),
        _row("ahead", _beside("blas 3", 1.1, 1.2, 1.3)),
        _row("even", _beside("blas 3", 0.98, 0.99, 1.01)),
        _row("silent", behind),
    ]
    notes = {
        "f32 hot fits": {"beside": "blas", "why": "of a reason"},
        "f32 hot other": {"beside": "mkl", "why": "of another"},
        "f32 hot ahead": {"beside": "blas", "why": "it was once"},
        "f32 hot gone": {"beside": "blas", "why": "nobody knows"},
        "bf16 hot fits": {"beside": "blas", "why": "this section was not measured"},
    }

    code, report, messages = _report(tmp_path, capsys, monkeypatch, rows, notes)

    assert code == performance.MISFIT
    assert "of a reason" in report
    assert "of another" not in report
    assert "it was once" not in report
    assert "the 95 % interval holds 1" in report
    for told in ("hot other: written", "hot ahead: no baseline", "hot gone: ", "hot silent: "):
        assert told in messages
    assert len(messages.splitlines()) == 4


def test_sections_of_cold_weights_and_two_threads_say_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = _beside("onednn 3", 1.1, 1.2, 1.3)
    rows = [
        _row("same", ahead),
        _row("differs", ahead),
        _row("same", ahead, regime="cold_weights"),
        _row("differs", ahead, regime="cold_weights", kernel="other"),
        _row("same", ahead, _beside("one-thread", 1.8, 1.9, 2.0), threads=2),
        _row("differs", ahead, _beside("one-thread", 0.8, 0.9, 0.95), threads=2),
    ]

    code, report, messages = _report(tmp_path, capsys, monkeypatch, rows, {})

    assert code == 0
    assert not messages
    assert "another kernel than with hot weights: 1 of 2 layers" in report
    assert "slower than one thread: differs of 2 layers" in report
    assert report.count("the best of all: **1.200**") == 3


def test_layers_for_two_threads_are_the_public_ones_that_are_large() -> None:
    public = _layers(publish.ALL)

    assert _layers(publish.LARGE) == [
        layer
        for layer in public
        if 2 * int(layer["m"]) * int(layer["n"]) * int(layer["k"]) > SMALL_FLOP
    ]


def test_plan_goes_on_where_it_was_left(tmp_path: Path) -> None:
    step = publish.STEPS[0]
    plan = publish.Plan(
        results=tmp_path,
        steps=(step,),
        budget_s=10.0,
        shapes=publish.SHAPES,
        report=tmp_path / "performance.md",
    )
    sweep, *benches = plan.left_of(step)

    (tmp_path / sweep.output).touch()

    assert plan.left_of(step) == benches
    assert [bench.arguments[0] for bench in benches] == ["bench", "bench"]
