"""Answers that are ready to be signed: they say what the verdicts do, or they are not there."""

from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    SOURCE_TEXT,
    make_artifact,
    make_disturbed_trial,
    make_trial,
    make_trial_beside_mkl,
)
from sqlalchemy import Engine, text

from gemm_tuner.answer.document import Unsigned
from gemm_tuner.answer.telling import measured_here, sentences
from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.record import Outcome, SweepEnd
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.statements import RowsDamaged
from gemm_tuner.store.verdicts.asking import Found, ReadyAnswer
from gemm_tuner.store.verdicts.ready import FORM
from gemm_tuner.store.wire.verdict import dump_verdict, load_verdict
from gemm_tuner.trust.attestation import MeasuringKeys

BINARY = b"\x7fELF"
NOW = datetime(2026, 11, 24, tzinfo=UTC)


def _ready(repository: Repository, cpu: Cpu = CPU) -> ReadyAnswer | None:
    [ready] = repository.ready_each([(PROBLEM, cpu, CONTEXT)])
    if isinstance(ready, Found):
        assert repository.known_of(ready) == repository.known(PROBLEM, cpu=cpu, context=CONTEXT)
        return None
    return ready


def _tune(repository: Repository) -> None:
    artifact = make_artifact(BINARY)
    repository.add_build(artifact, binary=BINARY, source_text=SOURCE_TEXT)
    repository.add_trial(make_trial(artifact=artifact))


def test_the_answer_of_a_verdict_is_ready_when_it_is_derived(repository: Repository) -> None:
    _tune(repository)

    best = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)

    assert best.verdict.artifact is not None
    answer = Unsigned.of(best.verdict, best.explain)
    assert _ready(repository) == ReadyAnswer(answer.packed(), best.serial)
    assert _ready(repository, SIBLING_CPU) is None, "it was not measured there"


def test_the_serial_is_that_of_all_that_is_known(repository: Repository) -> None:
    _tune(repository)
    before = _ready(repository)
    repository.add_trial(make_trial(cpu=SIBLING_CPU, artifact=make_artifact(BINARY), minute=1))

    after = _ready(repository)

    assert before is not None
    assert after is not None
    assert after.content == before.content
    assert after.serial == choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).serial
    assert after.serial > before.serial


def test_a_disturbed_measurement_gives_no_answer_that_is_ready(repository: Repository) -> None:
    artifact = make_artifact(BINARY)
    repository.add_build(artifact, binary=BINARY, source_text=SOURCE_TEXT)
    repository.add_trial(replace(make_disturbed_trial(), artifact=artifact))

    assert _ready(repository) is None


def test_a_revoked_kernel_is_not_ready_until_that_is_lifted(repository: Repository) -> None:
    _tune(repository)
    sha256 = make_artifact(BINARY).sha256

    repository.revoke(sha256, reason="it is slow", actor="me", now=NOW)
    assert _ready(repository) is None
    repository.lift(sha256, reason="it is not", actor="me", now=NOW)
    assert _ready(repository) is not None


@pytest.mark.parametrize(
    "change",
    [
        "answer = x'00'",
        "answer = zeroblob(4000)",
        "answer = 'text'",
        "answer = CAST(x'ff80' AS TEXT)",
        "answer = zeroblob(50000000)",
        "attestation = substr(attestation, 1, 64)",
        "attestation = 'text'",
        "answer = CAST(substr(answer, 1, 32) || x'7b' AS BLOB)",
        "answer = substr(answer, 1, length(answer) - 1)",
        "answer = 7",
        "answer = NULL",
    ],
)
def test_what_was_changed_is_not_ready(tmp_path: Path, change: str) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    repository = Repository(engine)
    _tune(repository)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE verdicts SET {change}"))  # noqa: S608 - ours

    assert _ready(repository) is None
    engine.dispose()


@pytest.mark.parametrize("serial", ["'text'", "1.5", "9e999", "x'01'"])
def test_a_damaged_row_is_told_of(tmp_path: Path, serial: str) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    repository = Repository(engine)
    _tune(repository)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE verdicts SET serial = {serial}"))  # noqa: S608 - ours

    [found] = repository.ready_each([(PROBLEM, CPU, CONTEXT)])

    assert isinstance(found, Found)
    with pytest.raises(RowsDamaged, match="did not store"):
        repository.known_of(found)
    engine.dispose()


def test_an_answer_to_another_question_is_not_ready(repository: Repository, engine: Engine) -> None:
    _tune(repository)
    repository.add_trial(make_trial(cpu=SIBLING_CPU, artifact=make_artifact(BINARY), minute=1))
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT cpu_key, answer FROM verdicts")).all()
        answers = {row.cpu_key: row.answer for row in rows}
        moved = {"other": answers[SIBLING_CPU.exact_key], "key": CPU.exact_key}
        connection.execute(text("UPDATE verdicts SET answer = :other WHERE cpu_key = :key"), moved)

    assert _ready(repository) is None
    assert _ready(repository, SIBLING_CPU) is not None


def test_what_another_user_sealed_is_not_ready(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    _tune(repository)
    own = MeasuringKeys().own()
    other = MeasuringKeys(tmp_path / "other")
    assert own is not None

    assert _ready(Repository(engine, other)) is None
    other.accept(own)
    assert _ready(Repository(engine, other)) is None
    theirs = choose(Repository(engine, other), PROBLEM, cpu=CPU, context=CONTEXT)
    assert theirs.verdict == choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict


def test_a_kernel_that_is_lost_is_not_ready(repository: Repository, engine: Engine) -> None:
    _tune(repository)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM artifacts"))

    assert _ready(repository) is None


def test_what_rests_on_another_key_is_not_ready(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    others = MeasuringKeys(tmp_path / "other")
    _tune(Repository(engine, others))
    key = others.own()
    assert key is not None
    MeasuringKeys().accept(key)
    assert repository.derive_again() == 1

    verdict = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict

    assert verdict.artifact is not None
    assert _ready(repository) is None, "it holds as long as the other key is believed"


def _check(repository: Repository) -> None:
    """Check that an answer, if one is ready, is that which the verdict gives."""
    best = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)
    ready = _ready(repository)
    expected = ReadyAnswer(Unsigned.of(best.verdict, best.explain).packed(), best.serial)
    assert ready in {None, expected}


def test_the_build_of_another_user_is_not_ready(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    _tune(repository)
    other = Repository(engine, MeasuringKeys(tmp_path / "other"))
    other.add_build(make_artifact(BINARY), binary=BINARY, source_text=SOURCE_TEXT)
    _check(repository)


def test_a_build_that_another_user_attests_is_not_ready(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    _tune(repository)
    assert Repository(engine, MeasuringKeys(tmp_path / "other")).attest_artifacts() == 1
    _check(repository)


def _another_build(repository: Repository, binary: bytes = b"\x7fELF other") -> Artifact:
    artifact = make_artifact(binary)
    repository.add_build(artifact, binary=binary, source_text=SOURCE_TEXT)
    return artifact


@pytest.mark.parametrize("other", ["NULL", "(SELECT sha256 FROM artifacts WHERE sha256 <> :own)"])
def test_a_revoked_kernel_is_not_served_for_another(
    repository: Repository, engine: Engine, other: str
) -> None:
    _tune(repository)
    own = make_artifact(BINARY).sha256
    _another_build(repository)
    repository.revoke(own, reason="wrong", actor="me", now=NOW)
    with engine.begin() as connection:
        query = f"UPDATE verdicts SET artifact = {other}"  # noqa: S608 - ours
        connection.execute(text(query), {"own": own} if ":own" in query else {})

    assert _ready(repository) is None


@pytest.mark.parametrize("change", ["attestation = NULL", "document = '{}'", "attested_by = ''"])
def test_a_kernel_that_nobody_attests_is_not_ready(
    repository: Repository, engine: Engine, change: str
) -> None:
    _tune(repository)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE artifacts SET {change}"))  # noqa: S608 - ours

    assert _ready(repository) is None


def test_the_answer_of_an_earlier_verdict_is_not_ready(
    repository: Repository, engine: Engine
) -> None:
    """An older version, which was open when the database was migrated, leaves such a row."""
    _tune(repository)
    slower = _another_build(repository)
    with engine.begin() as connection:
        old = connection.execute(text("SELECT answer FROM verdicts")).scalar()
    repository.add_trial(make_trial(artifact=slower, nr=32, call_ns=900, minute=1))
    wrong = make_trial(artifact=make_artifact(BINARY), minute=2, outcome=Outcome.WRONG)
    repository.add_trial(replace(wrong, measurement=None, detail="x"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET answer = :old"), {"old": old})

    verdict = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict
    assert verdict.artifact == slower
    assert _ready(repository) is None


def test_without_a_measuring_key_nothing_is_ready(
    repository: Repository, engine: Engine, tmp_path: Path
) -> None:
    _tune(repository)
    before = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)
    with engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET attested_by = ''"))

    assert choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict == before.verdict
    assert _ready(Repository(engine, MeasuringKeys(tmp_path / "none"))) is None


def test_a_serial_does_not_go_back(repository: Repository) -> None:
    _tune(repository)
    repository.add_trial(make_trial(problem=replace(PROBLEM, n=64), artifact=make_artifact(BINARY)))
    serials = [repository.known(PROBLEM, cpu=CPU, context=CONTEXT).serial]
    end = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=1.0)

    for _time in range(2):
        repository.derive_again()
        serials.append(repository.known(PROBLEM, cpu=CPU, context=CONTEXT).serial)
        repository.mark_ended(
            PROBLEM,
            CPU.exact_key,
            CONTEXT,
            toolchain="gcc 12.2.0 -O3",
            generator="0.1.0-aaaa",
            end=end,
        )
        serials.append(repository.known(PROBLEM, cpu=CPU, context=CONTEXT).serial)

    assert serials == sorted(serials)
    assert serials[0] < serials[-1]


def test_an_answer_tells_why_a_library_was_not_raced() -> None:
    refused = Raced(package="onnxruntime 1.22", baseline="", call_ns=0.0, reason="it\ncrashed.")
    unsaid = Raced(package="openvino 2026.1", baseline="", call_ns=0.0)

    told = sentences(_beside(refused, unsaid), "exact.")

    assert told[2:] == (
        "the baseline: mkl 2026.0, by gemm; raced: mkl 2026.0 (1 µs), onednn 3.2.0 (1.36 µs).",
        "not raced: onnxruntime 1.22: it crashed.",
        "not raced: openvino 2026.1: the record does not say why.",
    )


def test_an_answer_in_another_form_has_another_number() -> None:
    """Raise `FORM` with whatever changes these bytes: stored answers have the words of before."""
    refused = Raced(package="onnxruntime 1.22", baseline="", call_ns=0.0, reason="it crashed.")
    verdict = _beside(refused)
    answer = Unsigned.of(verdict, sentences(verdict, measured_here(CPU.exact_key)))

    assert (FORM, sha256(answer.packed()).hexdigest()[:16]) == (2, "c6d0bbceb0aa47e7")


def test_the_regime_of_a_race_is_kept_and_told_where_it_is_another() -> None:
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    in_memory = Raced(package="x 1", baseline="x 1", call_ns=2000.0, regime=Regime.COLD_WEIGHTS)
    late = replace(in_memory, baseline="", call_ns=0.0, reason="slow", lacked_time=True)
    of_older_version = replace(_beside(), context=cold)
    assert of_older_version.measurement is not None
    measured = replace(of_older_version.measurement, raced=(in_memory, late))
    verdict = replace(of_older_version, measurement=measured)

    assert any("; raced with hot weights: mkl" in one for one in sentences(of_older_version, ""))
    assert any("; raced: x 1 (2 µs)." in one for one in sentences(verdict, ""))
    assert verdict.basis is not None
    kept, _keys = load_verdict(
        dump_verdict(verdict),
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        context=cold,
        basis=verdict.basis,
    )
    assert kept == verdict


def _beside(*refused: Raced) -> Verdict:
    """Return the verdict of a trial beside MKL, with which these libraries could not be raced."""
    trial = make_trial_beside_mkl()
    assert trial.artifact is not None
    assert trial.measurement is not None
    raced = (*trial.measurement.raced, *refused)
    measured = replace(trial.measurement, implementation="gemm", raced=raced)
    artifact = replace(trial.artifact, abi_version=2)  # no part of the form
    return derive_verdict(
        [replace(trial, artifact=artifact, measurement=measured)],
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        context=CONTEXT,
        complete=True,
    )
