"""Answers that are ready to be signed: they say what the verdicts do, or they are not there."""

from dataclasses import replace
from datetime import UTC, datetime
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
)
from sqlalchemy import Engine, text

from gemm_tuner.answer.document import Unsigned
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.store.asking import Found, ReadyAnswer
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.statements import RowsDamaged
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


def test_a_damaged_row_is_told_of(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    repository = Repository(engine)
    _tune(repository)
    with engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET serial = 'text'"))

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
