"""From records of this CPU model to kernels that are proved, timed and served here."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from planted_times import plant_speeds, plant_speeds_of
from saboteur import Saboteur
from samples import make_artifact, make_trial
from served import Site

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.select.recorded import Recorded, Records
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.wire.record import dump_record
from gemm_tuner.tuning import sampling
from gemm_tuner.tuning.adopt import adopt, plan
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.settings import SweepSettings

PROBLEM = Problem.parse("f32 9x33x20 nk bias+relu")
OTHER = Problem.parse("f32 5x17x12 nk none")
ARGUMENTS = ["9", "33", "20", "--epilogue", "bias+relu"]
HERE = detect_cpu()
CONTEXT = ExecutionContext()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite3"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Return a file of two layers."""
    path = tmp_path / "layers.csv"
    path.write_text("name,m,n,k,epilogue\none,9,33,20,bias+relu\ntwo,5,17,12,none\n")
    return path


def candidates_of(problem: Problem) -> list[Candidate]:
    return shortlist(Space(problem=problem, cpu=HERE), 2)


def record_of(
    candidate: Candidate, *, problem: Problem = PROBLEM, call_ns: int = 500, **changes: object
) -> Trial:
    """Return what another machine of this CPU model may have recorded."""
    isa = family_named(candidate.micro_kernel.family).isa
    artifact = make_artifact(candidate.text.encode(), required_isa=isa)
    trial = make_trial(
        problem=problem, candidate=candidate, cpu=HERE, call_ns=call_ns, artifact=artifact
    )
    return replace(trial, **changes)  # type: ignore[arg-type]  # fields by name


def import_records(url: str, trials: Sequence[Trial]) -> None:
    Repository(open_database(url)).add_imported(trials)


def adopt_facts(
    url: str, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["adopt", *arguments, "--db", url, "--json"]) == code
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.proof
def test_what_one_machine_swept_another_adopts_and_serves(
    url: str,
    shapes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    first, file = f"sqlite:///{tmp_path}/first.sqlite3", tmp_path / "records.jsonl"
    layers = ["--shapes", str(shapes)]
    assert run(["sweep", *layers, "--budget", "500ms", "--db", first]) == 0
    assert run(["records", "export", str(file), "--db", first]) == 0
    with file.open("a") as stream:
        stream.write('{"problem": "f32 9x33x20')  # a file that was cut off
    assert run(["records", "import", str(file), "--db", url]) == 1
    repository = Repository(open_database(url))
    assert choose(repository, PROBLEM, cpu=HERE, context=CONTEXT).verdict.artifact is None

    facts = adopt_facts(url, capsys, *layers)
    again = adopt_facts(url, capsys, *layers)

    swept = {trial.candidate.text for trial in Repository(open_database(first)).trials()}
    for layer, problem in zip(facts["layers"], (PROBLEM, OTHER), strict=True):
        assert layer["basis"] == "measured"
        assert layer["record"]["source"] == "imported into this database"
        assert layer["candidate"] in swept
        assert 1 <= layer["tried"] <= 3
        assert layer["before"]["basis"] == "none"
        verdict = choose(repository, problem, cpu=HERE, context=CONTEXT).verdict
        assert verdict.basis is Basis.MEASURED
        assert verdict.decision is Decision.TUNED
        assert verdict.artifact is not None
        assert repository.binary(verdict.artifact.sha256)
        here = [one for one in repository.trials(problem=problem) if one.measurement]
        # All that came from the records were confirmed together: none needed a final before.
        assert {one.stage for one in here} == {Stage.CONFIRM}
        assert len(here) == layer["tried"]
    assert not facts["nothing_recorded"]
    assert not again["layers"]
    assert [layer["name"] for layer in again["current"]] == ["one", "two"]


def _stages_of_adoption(
    url: str, slow: Candidate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[tuple[Candidate, Stage]]:
    """Adopt three recorded kernels, one of them half as fast, and return what was timed of them."""
    import_records(url, [record_of(one) for one in candidates_of(PROBLEM)])
    header = f"// {slow.text}"
    plant_speeds_of(monkeypatch, lambda one: 1.0 if header in one.source.text.splitlines() else 2.0)

    adopt_facts(url, capsys, *ARGUMENTS)

    kept = Repository(open_database(url)).trials(problem=PROBLEM)
    return [(one.candidate, one.stage) for one in kept if one.measurement]


def test_what_leaves_the_rounds_early_is_not_confirmed(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, other = candidates_of(PROBLEM)

    stages = _stages_of_adoption(url, slow, monkeypatch, capsys)

    assert dict(stages) == {slow: Stage.FINAL, other: Stage.CONFIRM}
    assert len(stages) == 2


def test_long_calls_are_confirmed_after_a_final(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling, "_LONG_CALL_S", 0.0)
    slow, _other = candidates_of(PROBLEM)

    stages = _stages_of_adoption(url, slow, monkeypatch, capsys)

    assert [stage for _one, stage in stages] == [Stage.FINAL, Stage.FINAL, Stage.CONFIRM]


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.WRONG])
def test_a_record_of_what_is_wrong_here_is_refuted_and_not_served(
    url: str, outcome: Outcome
) -> None:
    """The best of what is recorded crashes here or is wrong; the next is right."""
    candidates = candidates_of(PROBLEM)
    saboteur = Saboteur([candidates[0]])
    saboteur.plan[candidates[0]] = outcome
    repository = Repository(open_database(url))
    settings = SweepSettings(toolchain=find_toolchain(), budget_s=600.0, render=saboteur)
    records = Records(
        found=tuple(
            Recorded(trial=record_of(one, call_ns=100 * place), source="a test")
            for place, one in enumerate(candidates, start=1)
        )
    )
    planned = plan(
        PROBLEM, [CONTEXT], cpu=HERE, repository=repository, settings=settings, records=records
    )

    (adopted,) = adopt(
        PROBLEM,
        planned,
        cpu=HERE,
        repository=repository,
        settings=settings,
        on_progress=lambda _progress: None,
        is_stopped=lambda: False,
    )

    assert planned[0].winners.candidates == tuple(candidates)
    outcomes = {trial.candidate: trial.outcome for trial in adopted.failed}
    assert outcomes == {candidates[0]: outcome}
    assert adopted.result.verdict.candidate == candidates[1]
    assert adopted.record is records.found[1]
    served = choose(repository, PROBLEM, cpu=HERE, context=CONTEXT).verdict
    assert served.candidate == candidates[1]
    assert served.measurement is not None
    assert served.measurement.baseline_median_ns != 1000  # that of the records


def test_records_of_another_cpu_model_are_not_taken(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = replace(HERE, model=HERE.model + 1)
    import_records(url, [record_of(one, cpu=elsewhere) for one in candidates_of(PROBLEM)])

    assert run(["adopt", *ARGUMENTS, "--db", url]) == 1

    told = capsys.readouterr().out
    assert f"is recorded of {PROBLEM.text} on the model {HERE.model_key}" in told
    assert "gemm-tuner sweep" in told
    assert not Repository(open_database(url)).trials(problem=PROBLEM)


def test_a_damaged_line_of_the_package_is_told_and_the_others_are_adopted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemm_tuner.store.exchange.tuning_db_dir", lambda: tmp_path)
    whole = dump_record(record_of(candidates_of(PROBLEM)[0]))
    file = tmp_path / f"{HERE.exact_key}.jsonl"
    file.write_text(whole.replace('"threads":1', '"threads":-1') + "\n" + whole + "\n")

    assert run(["adopt", *ARGUMENTS, "--db", url]) == 0

    captured = capsys.readouterr()
    assert f"line 1 of {file.name} is no record: threads" in captured.err
    assert "shipped with gemm-tuner" in captured.out
    assert "1 problem," in captured.out


def test_without_a_layer_what_another_generator_confirmed_is_measured_again(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = Repository(open_database(url))
    (candidate, *_others) = candidates_of(PROBLEM)
    trial = record_of(candidate)
    assert trial.artifact is not None
    repository.add_build(
        trial.artifact, binary=candidate.text.encode(), source_text="// a kernel\n"
    )
    repository.add_trial(trial)
    before = choose(repository, PROBLEM, cpu=HERE, context=CONTEXT).verdict
    plant_speeds(monkeypatch, repeat(0.5))

    planned = adopt_facts(url, capsys, "--dry-run")
    kept = repository.trials(problem=PROBLEM)
    assert run(["adopt", "--db", url]) == 0
    told = capsys.readouterr().out
    again = adopt_facts(url, capsys)

    assert before.decision is Decision.TUNED
    assert kept == (trial,)
    (context,) = planned["layers"][0]["contexts"]
    assert context["why"] == f"timed with another generator, {trial.generator}"
    assert context["records"][0]["candidate"] == candidate.text
    assert "Changed verdicts, 1 of 1 that were measured before" in told
    assert f"tuned: {candidate.text}" in told
    assert f"baseline: {candidate.text}, not served" in told
    now = choose(repository, PROBLEM, cpu=HERE, context=CONTEXT).verdict
    assert now.decision is Decision.BASELINE
    assert now.generator == generator_version()
    assert not again["layers"]
    assert len(again["current"]) == 1


def test_a_plan_makes_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adopt_facts(f"sqlite:///{tmp_path}/none/store.sqlite3", capsys, *ARGUMENTS, "--dry-run")

    assert not list(tmp_path.iterdir())


def test_a_service_tells_what_it_recorded(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = f"sqlite:///{tmp_path}/theirs.sqlite3"
    repository = Repository(open_database(theirs))
    (candidate, *_others) = candidates_of(PROBLEM)
    repository.add_trial(record_of(candidate))
    repository.add_trial(record_of(candidate, cpu=replace(HERE, model=HERE.model + 1)))
    site = Site.at(theirs, tmp_path / "key.pem", repository)

    with site.serving() as address:
        facts = adopt_facts(url, capsys, *ARGUMENTS, "--url", address)

    (layer,) = facts["layers"]
    assert layer["basis"] == "measured"
    assert layer["record"]["source"] == address
    assert layer["candidate"] == candidate.text
    assert not Repository(open_database(url)).cpu(replace(HERE, model=HERE.model + 1).exact_key)


def test_a_sweep_tries_first_what_is_recorded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the model ranks last is tried in no time at all, because it won elsewhere."""
    plant_speeds(monkeypatch, repeat(2.0))
    last = shortlist(Space(problem=PROBLEM, cpu=HERE))[-1]
    import_records(url, [record_of(last, cpu=replace(HERE, stepping=HERE.stepping + 1))])

    assert run(["sweep", *ARGUMENTS, "--budget", "1ms", "--db", url]) == 0

    tried = {trial.candidate for trial in Repository(open_database(url)).trials(problem=PROBLEM)}
    assert last in tried


@pytest.mark.proof
def test_ctrl_c_keeps_what_was_adopted_and_a_second_run_goes_on(
    url: str, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for problem in (PROBLEM, OTHER):
        import_records(url, [record_of(candidates_of(problem)[0], problem=problem)])
    command = [sys.executable, "-m", "gemm_tuner", "adopt", "--shapes", str(shapes), "--db", url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("two (2 of 2)"):
                break
        process.send_signal(signal.SIGINT)
        out, messages = process.communicate(timeout=60)

    kept = Repository(open_database(url)).trials(problem=PROBLEM)
    assert process.returncode == 1
    assert "run the same command again to go on" in messages
    assert "Traceback" not in messages
    assert PROBLEM.text in out
    assert Stage.CONFIRM in {trial.stage for trial in kept}
    adopt_facts(url, capsys, "--shapes", str(shapes))
    for problem in (PROBLEM, OTHER):
        verdict = choose(Repository(open_database(url)), problem, cpu=HERE, context=CONTEXT).verdict
        assert verdict.basis is Basis.MEASURED


def test_without_a_compiler_nothing_is_tried(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert run(["adopt", *ARGUMENTS, "--compiler", "gcc", "--db", url]) == 3

    assert "gcc" in capsys.readouterr().err
    assert not (tmp_path / "store.sqlite3").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dtype", "bf16"], "--dtype is of a layer, and there is none"),
        (["--regime", "both"], "--regime is of a layer, and there is none"),
        ([*ARGUMENTS, "--budget", "0s"], "duration '0s'"),
        ([*ARGUMENTS, "--url", "nowhere"], "service address 'nowhere'"),
    ],
)
def test_what_is_asked_amiss_is_answered_with_what_to_do(
    url: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", *arguments, "--db", url]) == 2
    assert told in capsys.readouterr().err


def test_without_a_layer_and_a_database_there_is_nothing_to_adopt(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", "--db", url]) == 3
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "store.sqlite3").exists()
