import csv
import json
from pathlib import Path
from typing import Any

import front_page
import performance
import publish_steps
import pytest
from bench_rows import SEVERAL_M
from performance_summary import read_summary

SMALL_FLOP = 10_000_000


def _layers(name: str) -> list[dict[str, str]]:
    with (publish_steps.ROOT / publish_steps.SHAPES / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _beside(baseline: str, low: float, median: float, high: float) -> dict[str, Any]:
    ratio = {"low": low, "median": median, "high": high, "of_minimums": median}
    return {"baseline": baseline, "computes": "layer", "ratio": ratio, "share_of_roofline": 0.4}


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


def _write(results: Path, rows: list[dict[str, Any]], *, key: str = "x") -> None:
    document = {"cpu": "a CPU", "cpu_key": key, "generator": "1 abc", "date": "2026-11-20"}
    results.mkdir(exist_ok=True)
    (results / "1.json").write_text(json.dumps(document | {"layers": rows}))
    (results / performance.COMMANDS).write_text("gemm-tuner bench\n")


def _report(
    tmp_path: Path, rows: list[dict[str, Any]], notes: dict[str, dict[str, str]]
) -> tuple[int, str, str]:
    """Return the exit code, the report and the front page."""
    _write(tmp_path / "results", rows)
    folder = tmp_path / "docs" / front_page.CPUS
    folder.mkdir(parents=True)
    (folder / "here-notes.json").write_text(json.dumps(notes))
    code = performance.write_reports(tmp_path / "results", "here", tmp_path / "docs")
    front = (tmp_path / "docs" / front_page.FRONT_PAGE).read_text()
    return code, (folder / "here.md").read_text(), front


def test_notes_are_shown_where_they_fit_and_told_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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

    code, report, front = _report(tmp_path, rows, notes)

    messages = capsys.readouterr().err
    assert code == performance.MISFIT
    assert "of a reason" in report
    assert "of another" not in report
    assert "it was once" not in report
    assert "the 95 % interval holds 1" in report
    for told in ("hot other: written", "hot ahead: no baseline", "hot gone: ", "hot silent: "):
        assert told in messages
    assert len(messages.splitlines()) == 4
    for page, next_part in ((report, "## Conditions"), (front, "## Means")):
        assert "A library is faster for 3 of the 5 kernels" in page
        assert page.index("of a reason") < page.index(next_part)


def test_sections_of_cold_weights_and_two_threads_say_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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

    code, report, _front = _report(tmp_path, rows, {})

    assert code == 0
    assert not capsys.readouterr().err
    assert "another kernel than with hot weights: 1 of 2 layers" in report
    assert "slower than one thread: differs of 2 layers" in report
    assert report.count("onednn 3: **1.200** over 2 layers, always the fastest") == 3


def test_layers_beside_inductor_are_a_section_of_their_own(tmp_path: Path) -> None:
    ahead, compiled = _beside("onednn 3", 1.1, 1.2, 1.3), _beside("torch-inductor 2", 1.4, 1.5, 1.6)
    rows = [_row("one", ahead, compiled), _row("one", ahead), _row("two", ahead)]

    code, report, front = _report(tmp_path, rows, {})

    assert code == 0
    assert "| f32, hot | 2 | onednn 1.200 (2; always the fastest) | 0 | 0 |" in report
    means = "onednn 1.200 (1; always the fastest), torch-inductor 1.500 (1)"
    assert f"| f32, hot, beside Inductor | 1 | {means} | 0 | 0 |" in report
    assert "torch-inductor" in front


def test_each_library_has_a_mean_of_its_own(tmp_path: Path) -> None:
    onednn, blas = _beside("onednn 3", 1.1, 1.2, 1.3), _beside("blas 3", 1.4, 1.5, 1.6)
    fast_blas = _beside("blas 3 + pass", 1.0, 1.1, 1.2)
    rows = [_row("one", onednn, blas), _row("two", onednn, fast_blas), _row("three", onednn)]

    _code, report, front = _report(tmp_path, rows, {})

    assert "- onednn 3: **1.200** over 3 layers, 1.200 over the 2 where it is the fastest" in report
    assert "- blas 3: **1.285** over 2 layers, 1.100 over the 1 where it is the fastest" in report
    assert "onednn 1.200 (3; fastest 1.200 of 2), blas 1.285 (2; fastest 1.100 of 1)" in front
    assert "best of" not in front


def test_no_mean_holds_what_was_disturbed_or_is_implausible(tmp_path: Path) -> None:
    fair = _beside("onednn 3", 1.1, 1.2, 1.3) | {"doubt": None}
    doubted = _beside("onednn 3", 90.0, 99.0, 99.9) | {"doubt": "implausible: above the roof"}

    _code, report, front = _report(tmp_path, [_row("one", fair), _row("two", doubted)], {})

    assert "| f32, hot | 2 | onednn 1.200 (1; always the fastest) | 1 | 0 |" in report
    assert "99.000" not in report
    assert front.count("onednn 1.200 (1; always the fastest)") == 1


def _option(candidate: str | None, packed_format: str, **more: float) -> dict[str, Any]:
    ratio = {"median": 1.25} if candidate else None
    return {"candidate": candidate, "packed_format": packed_format, "ratio": ratio, **more}


def test_layers_of_several_m_say_what_each_gives_up(tmp_path: Path) -> None:
    results = tmp_path / "results"
    row = _row("one", _beside("onednn 3", 1.1, 1.2, 1.3))
    _write(results, [row])
    several = json.loads((results / "1.json").read_text())
    several["layers"] = [row | {"problem": "f32 1..8x16x32 nk bias"}]
    (results / f"2-f32-{SEVERAL_M}-hot.json").write_text(json.dumps(several))
    kernels = [
        {"m": "1", "best": _option("a", "A"), "chosen": _option("b", "B", loss=0.013)},
        {"m": "8", "best": _option(None, "C"), "chosen": _option(None, "C", loss=0.0)},
    ]
    shared = {
        "layer": "f32 16x32 nk bias",
        "max_loss": 0.02,
        "kernels": kernels,
        "formats": ["B", "C"],
        "packed_bytes": 3 * 2**20,
        "best_packed_bytes": 5 * 2**20,
    }
    (results / "2-sweep.json").write_text(json.dumps({"layers": [], "shared": [shared]}))

    code = performance.write_reports(results, "here", tmp_path)

    report = (tmp_path / front_page.CPUS / "here.md").read_text()
    assert code == 0
    assert "## f32, hot, several m" in report
    assert "| 1..8 x 16 x 32 | bias | `k` | 100 ns | 82 |" in report
    assert "| f32 16x32 nk bias | 1 | `a` | 1.250 | `b` | 1.250 | 1.3% | `B` |" in report
    assert "| f32 16x32 nk bias | 8 | oneDNN | 1.000 | oneDNN | 1.000 | 0.0% | `C` |" in report
    assert "take 3 MiB, and 5 MiB where each m has its best" in report
    assert "f32 16x32 nk bias (1 of 1 layers)" in report
    front = (tmp_path / front_page.FRONT_PAGE).read_text()
    assert [line.split(" | ")[4] for line in front.splitlines() if line.startswith("| f32")] == [
        "1",
        "1, several m",
    ]


def test_front_page_has_the_same_sections_of_all_cpus_side_by_side(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    rows = [
        _row("cube", _beside("onednn 3", 1.1, 1.2, 1.3)),
        _row("cube", _beside("onednn 3", 1.0, 1.1, 1.2), regime="cold_weights"),
    ]
    for name, key in (("one", "x"), ("other", "y")):
        _write(tmp_path / name, rows, key=key)
        performance.write_reports(tmp_path / name, name, docs)

    front = (docs / front_page.FRONT_PAGE).read_text()

    assert [line.split(" | ")[1:4] for line in front.splitlines() if line.startswith("| f32")] == [
        ["hot", "1", "one"],
        ["hot", "1", "other"],
        ["cold", "1", "one"],
        ["cold", "1", "other"],
    ]
    assert front.count("No library is shown to be faster") == 2
    assert "performance/one.md" in front


def test_report_does_not_replace_that_of_another_cpu(tmp_path: Path) -> None:
    ahead = [_row("cube", _beside("onednn 3", 1.1, 1.2, 1.3))]
    _write(tmp_path / "one", ahead, key="x")
    _write(tmp_path / "other", ahead, key="y")
    performance.write_reports(tmp_path / "one", "same", tmp_path)

    with pytest.raises(ValueError, match=r"same\.json is of x, not of y"):
        performance.write_reports(tmp_path / "other", "same", tmp_path)


def test_published_front_page_is_made_of_the_published_figures() -> None:
    written = (performance.DOCS / front_page.FRONT_PAGE).read_text()

    assert written == front_page.front_page_text(performance.DOCS)


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    (known, *_others) = sorted((performance.DOCS / front_page.CPUS).glob("*-*[0-9].json"))
    summary = read_summary(known)

    summary.write(tmp_path / "again.json")

    assert read_summary(tmp_path / "again.json") == summary
    assert (tmp_path / "again.json").read_text() == known.read_text()


def test_layers_for_two_threads_are_the_public_ones_that_are_large() -> None:
    public = _layers(publish_steps.ALL)

    assert _layers(publish_steps.LARGE) == [
        layer
        for layer in public
        if 2 * int(layer["m"]) * int(layer["n"]) * int(layer["k"]) > SMALL_FLOP
    ]
