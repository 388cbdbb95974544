"""Answers in memory: no query for what is known, and none that is not so any more."""

from collections.abc import Iterator
from datetime import UTC, datetime
from math import inf

import httpx
import pytest
from gemm_tuner_service.answering import answers as module
from gemm_tuner_service.answering.answers import Answer, Answers
from gemm_tuner_service.settings import Settings
from samples import PROBLEM, add_build, make_trial
from sqlalchemy import Engine, event, text

from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.watching import ChangeWatch

TODAY = datetime(2026, 11, 20, tzinfo=UTC).date()
QUESTION = ("f32 1x1x1 nk none", "cpu", frozenset[str](), 1, "hot")


def answer(text: str, *, is_lasting: bool = True) -> Answer:
    return Answer(content=text.encode(), tag=f'"{text}"', is_lasting=is_lasting)


@pytest.mark.parametrize(
    ("states", "days", "lasting", "made"),
    [
        ([1, 1], [0, 0], True, 1),
        ([1, 2], [0, 0], True, 2),
        ([1, 1], [0, 1], True, 2),
        ([1, 1], [0, 0], False, 2),
        ([None, None], [0, 0], True, 2),
    ],
    ids=["known", "changed", "another day", "not lasting", "not sure"],
)
def test_an_answer_is_made_again_where_it_may_be_another(
    states: list[int | None], days: list[int], made: int, *, lasting: bool
) -> None:
    coming = iter(states)
    kept = Answers(lambda: next(coming))
    count = 0

    def make() -> Answer:
        nonlocal count
        count += 1
        return answer("a", is_lasting=lasting)

    for day in days:
        kept.get(QUESTION, TODAY.replace(day=20 + day), make)

    assert count == made


def test_a_change_while_an_answer_is_made_shows_at_the_next_question() -> None:
    state = 1
    kept = Answers(lambda: state)

    def make_while_changing() -> Answer:
        nonlocal state
        state = 2
        return answer("old")

    kept.get(QUESTION, TODAY, make_while_changing)

    assert kept.get(QUESTION, TODAY, lambda: answer("new")).content == b"new"


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)
    kept = Answers(lambda: 1)
    for number in range(5):
        kept.get((str(number), *QUESTION[1:]), TODAY, lambda: answer("a"))
    kept.get(("large", *QUESTION[1:]), TODAY, lambda: answer("a" * 2**16))

    assert list(kept._answers) == [(name, *QUESTION[1:]) for name in ("3", "4")]


@pytest.fixture
def watched(engine: Engine, repository: Repository) -> Iterator[ChangeWatch]:
    watch = ChangeWatch(engine, repository)
    yield watch
    watch.close()


def test_what_another_process_writes_is_seen(
    settings: Settings, watched: ChangeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    before = watched.state()
    assert watched.state() == before

    other = open_database(settings.database_url)
    Repository(other).add_trial(make_trial(minute=1))
    other.dispose()

    assert watched.state() != before


def test_a_known_answer_costs_no_query(engine: Engine, watched: ChangeWatch) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("a server is asked for its counter of changes")
    watched.state()
    statements: list[str] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _u, text, *_rest: statements.append(text)
    )

    watched.state()

    assert statements == []


def test_the_state_is_told_at_once_only_where_it_is_known(
    settings: Settings, watched: ChangeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every_s = "gemm_tuner.store.watching.LOOK_EVERY_S"  # of a server
    monkeypatch.setattr(look_every_s, inf)
    assert watched.state_at_once() is None
    before = watched.state()
    assert watched.state_at_once() == before

    other = open_database(settings.database_url)
    Repository(other).add_trial(make_trial(minute=1))
    other.dispose()

    monkeypatch.setattr(look_every_s, 0)
    after = watched.state()
    assert after != before
    monkeypatch.setattr(look_every_s, inf)
    assert watched.state_at_once() == after


def test_a_change_is_not_told_before_it_is_read(
    settings: Settings, watched: ChangeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    watched.state()

    other = open_database(settings.database_url)
    Repository(other).add_trial(make_trial(minute=1))
    other.dispose()

    assert watched.state_at_once() is None
    assert watched.state_at_once() is None


def test_what_was_restored_and_changed_anew_is_not_taken_for_what_it_was(
    engine: Engine,
    repository: Repository,
    watched: ChangeWatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    backup = repository.changes()
    repository.add_trial(make_trial(minute=1))
    before = watched.state()

    with engine.begin() as connection:  # as a backup that is put back does
        connection.execute(text("UPDATE verdict_state SET changes = :number"), {"number": backup})
    repository.add_trial(make_trial(minute=2))

    assert watched.state() != before


def test_a_known_answer_needs_no_look_at_the_store(
    own_client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {"problem": PROBLEM.text}
    first = own_client.post("/v1/resolve", json=question)

    def fail(*_arguments: object, **_options: object) -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(Repository, "known", fail)
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 1e9)
    again = own_client.post("/v1/resolve", json=question)
    unchanged = own_client.post(
        "/v1/resolve", json=question, headers={"If-None-Match": first.headers["ETag"]}
    )
    batch = own_client.post("/v1/resolve:batch", json={"problems": [PROBLEM.text] * 3})

    assert (again.status_code, again.content) == (200, first.content)
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert [each["resolution"] for each in batch.json()["results"]] == [first.json()] * 3


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"problem": 1}', b'{"problem": "f32 1x1"}', b'{"problem": "\\ud800"}'],
)
def test_a_faulty_question_is_answered_with_its_fault(client: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/resolve", content=body, headers=headers)

    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_an_answer_follows_the_store(
    own_client: httpx.Client, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)

    def ask() -> httpx.Response:
        return own_client.post("/v1/resolve", json={"problem": PROBLEM.text})

    first, again = ask(), ask()
    artifact = add_build(repository, b"another kernel")
    repository.add_trial(make_trial(minute=1, call_ns=500, nr=32, artifact=artifact))
    after = ask()

    assert first.content == again.content
    assert after.json()["verdict"]["artifact"]["sha256"] == artifact.sha256
    assert first.headers["ETag"] != after.headers["ETag"]


def test_a_revoked_kernel_is_not_answered_from_memory(
    own_client: httpx.Client, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    question = {"problem": PROBLEM.text}
    named = own_client.post("/v1/resolve", json=question).json()["verdict"]["artifact"]

    repository.revoke(named["sha256"], reason="a test", actor="me", now=datetime.now(UTC))

    answer = own_client.post("/v1/resolve", json=question).json()
    assert answer["verdict"]["artifact"] is None
