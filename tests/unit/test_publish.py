import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import performance
import publish
import pytest
from performance_summary import read_summary
from publish_steps import Plan, steps_for

from gemm_tuner.machine.detect import detect_cpu


def _plan(results: Path) -> Plan:
    return Plan(
        results=results, steps={1: steps_for(2)[0]}, records=results / "records.jsonl", budget_s=1
    )


def _asked(tmp_path: Path, *words: str) -> Namespace:
    return publish.parser().parse_args([str(tmp_path), "--into", str(tmp_path), *words])


def test_plan_goes_on_where_it_was_left(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    commands = plan.pieces()["f32-1"]

    (tmp_path / commands[0].output).touch()

    assert plan.left_of(commands) == commands[1:]


def test_winners_are_timed_again_after_another_sweep(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    commands = plan.pieces()["f32-1"]

    for timed in commands[1:]:
        (tmp_path / timed.output).touch()

    sweep, _largest, *benches = commands
    assert plan.left_of(commands) == [sweep, *benches]


def test_one_thread_has_no_steps_of_several() -> None:
    assert all(step.threads == 1 for step in steps_for(1))
    assert [step.threads for step in steps_for(16)].count(16) == 3


def test_layers_of_several_m_are_not_those_of_another_file(tmp_path: Path) -> None:
    step = next(step for step in steps_for(1) if step.shares_weights)
    plan = Plan(results=tmp_path, steps={9: step}, records=tmp_path / "records.jsonl")

    sweep, bench = plan.pieces()[step.name]
    elsewhere = replace(plan, shapes=tmp_path / "layers.csv").pieces()[step.name]

    assert {"--share-weights", "--json"} < {*sweep.arguments}
    assert sweep.output.endswith(".json")
    assert bench.arguments[0] == "bench"
    assert elsewhere == []


def test_only_names_steps_or_types() -> None:
    chosen = publish.chosen_steps(16, ["int8", "bf16-16"])

    assert [step.name for step in chosen.values()] == [
        "int8-1",
        "int8-16",
        "bf16-16",
        "int8-several-m",
    ]
    with pytest.raises(ValueError, match="'f33' is no step; use some of: f32-1, f32"):
        publish.chosen_steps(2, ["f33"])


@pytest.mark.parametrize(
    ("vendor", "brand", "family", "model", "name"),
    [
        ("AuthenticAMD", "AMD EPYC 9654 96-Core Processor", 25, 17, "epyc-zen4"),
        ("GenuineIntel", "Intel(R) Xeon(R) Platinum 8481C", 6, 143, "xeon-sapphire-rapids"),
        ("GenuineIntel", "something new", 19, 1, "genuineintel-13-1"),
    ],
)
def test_cpu_is_named_for_its_make_and_core(
    vendor: str, brand: str, family: int, model: int, name: str
) -> None:
    cpu = replace(detect_cpu(), vendor=vendor, brand=brand, family=family, model=model)

    assert publish.cpu_name(cpu) == name


def test_missing_file_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there; give a CSV file or a folder"):
        publish.plan_of(_asked(tmp_path, "--shapes", str(tmp_path / "none.csv")))


@pytest.mark.baseline("onednn")
@pytest.mark.proof
def test_one_command_measures_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "layers.csv"
    shapes.write_text("name,m,n,k,epilogue\ntiny,16,16,128,bias+relu\n")
    results = tmp_path / "results"
    words = ("--shapes", str(shapes), "--budget", "1", "--name", "here", "--only", "w8")
    asked = _asked(tmp_path, *words)
    asked.results = results

    def publish_it() -> int:
        return publish.main(
            publish.plan_of(asked), name="here", docs=tmp_path / "docs", is_plan_only=False
        )

    code = publish_it()
    capsys.readouterr()
    again = publish_it()

    assert code in {0, performance.MISFIT}  # one round of a shared machine may go astray
    assert again == code
    assert "gemm-tuner" not in capsys.readouterr().out  # nothing was left to run
    front = (tmp_path / "docs" / "performance.md").read_text()
    assert front.count("| here | 1 |") == 2
    # The figures name a layer only where its time may be believed, which a busy machine decides.
    figures = read_summary(tmp_path / "docs" / "performance" / "here.json")
    assert {section.layers for section in figures.sections} == {1}
    for name in ("here.md", "here.svg"):
        assert "tiny" in (tmp_path / "docs" / "performance" / name).read_text()
    (records,) = (tmp_path / "tuning_db").iterdir()
    assert records.stem == detect_cpu().exact_key
    assert '"measurement"' in records.read_text()
    # On a busy machine, a second may be too short to confirm a kernel of both.
    assert re.search("\n[12] problems on .* the regret of", (results / "model.txt").read_text())
