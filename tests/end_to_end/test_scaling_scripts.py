"""The scripts behind docs/scaling.md, at the smallest size."""

from pathlib import Path

import forecast
import parts_alone
import pytest
import scaling_page
import simulation_error

from gemm_tuner.machine.cpus import usable_cpus

LAYERS = """name,m,n,k,epilogue
small,8,64,64,none
large,128,320,160,bias
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scaling.md"
    path.write_text(
        "".join(
            f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n"
            for name in ("parts alone", "simulation error", "forecast")
        )
    )
    monkeypatch.setattr(scaling_page, "PAGE", path)
    return path


@pytest.fixture
def layers(tmp_path: Path) -> str:
    path = tmp_path / "layers.csv"
    path.write_text(LAYERS)
    return str(path)


def rows_of(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def test_each_part_is_timed_and_the_page_written(
    page: Path, layers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts_alone, "EXTRA", ())
    monkeypatch.setattr(parts_alone, "SLICED", ("f32 1x64x2048", 2))
    monkeypatch.setattr(parts_alone, "ROUNDS", 1)

    parts_alone.main(["--layers", layers, "--seconds", "1", "--write"])

    text = capsys.readouterr().out
    printed = rows_of(text)
    assert printed[0][:3] == ["Layer", "Kernel", "Tiles"]
    assert printed[-1][0] == "large"  # the other has too few multiplications
    assert all(float(cell) > 0 for cell in printed[-1][3:])
    assert "- 16 parts: " in text  # the other has a row, and too few tiles for so many
    assert " of 1 layers with 4 tiles a part or more are at least 15.2 times" in text
    written = page.read_text()
    assert rows_of(written) == printed
    assert written.partition("- 16 parts: ")[2].startswith(text.partition("- 16 parts: ")[2])
    assert written.count("old") == 2


def test_simulated_calls_are_compared_with_timed_ones(
    page: Path, layers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulation_error, "ROUNDS", 1)

    simulation_error.main(["--layers", layers, "--seconds", "1", "--write"])

    printed = rows_of(capsys.readouterr().out)
    calls = [row for row in printed if row[0] == "large"]
    assert len(calls) >= 2 * min(2, usable_cpus())
    assert {row[1] for row in calls} == {"hot", "cold"}
    assert printed[-1][:3] == ["all", "all", str(len(calls))]
    assert "| large |" in page.read_text()


@pytest.mark.proof
def test_predictions_of_servers_are_written(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forecast, "LAYERS", ("f32 16x512x512",))

    forecast.main(["--threads", "64", "--write"])

    printed = rows_of(capsys.readouterr().out)
    assert [row[1:3] for row in printed[1:]] == [
        ["zen5", "hot"],
        ["zen5", "cold"],
        ["sapphire_rapids, two sockets", "hot"],
        ["sapphire_rapids, two sockets", "cold"],
    ]
    assert rows_of(page.read_text()) == printed


def test_the_page_of_the_checkout_has_each_section() -> None:
    text = scaling_page.PAGE.read_text()

    for name in ("parts alone", "simulation error", "forecast"):
        assert text.index(f"<!-- {name}: begin -->") < text.index(f"<!-- {name}: end -->")


def test_a_page_without_the_section_is_refused(page: Path) -> None:
    page.write_text("nothing")

    with pytest.raises(ValueError, match="has no section 'forecast'"):
        scaling_page.write_section("forecast", "text")
