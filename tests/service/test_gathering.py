"""Questions that come together: answered in groups, each for itself."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from gemm_tuner_service.answering.answers import Answer, Answers, Asked
from gemm_tuner_service.answering.gathering import Gathering
from gemm_tuner_service.answering.resolver import Answered, Resolver
from gemm_tuner_service.settings import Settings
from samples import CONTEXT, CPU, PROBLEM, make_trial
from sqlalchemy import Engine, event, text

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidProblem, StoreFailed
from gemm_tuner.select.lookup import TrialsNeeded
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.statements import RowsDamaged
from gemm_tuner.trust.keys import KeyPair

NOW = datetime(2026, 11, 23, tzinfo=UTC)
# A column of SQLite holds values of any type, and one of PostgreSQL only those of its own.
of_any_type = pytest.mark.parametrize("databases", ["sqlite"], indirect=True)


def asked_of(n: int) -> Asked:
    return Asked.of(replace(PROBLEM, n=n), CPU, CONTEXT)


def answer_of(asked: Asked) -> Answer:
    return Answer.of(asked.problem.text.encode())


class Desk:
    """Answers groups, each when it is let, and remembers their sizes."""

    def __init__(self, answered: Callable[[Asked], Answered] = answer_of) -> None:
        self.sizes: list[int] = []
        self.go = threading.Semaphore(0)
        self.slow = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self._answered = answered

    def answer_each(
        self, asked: list[Asked], _now: datetime, *, may_read_trials: bool
    ) -> list[Answered]:
        """Return an answer to each; one that takes long comes alone."""
        if not may_read_trials:
            self.sizes.append(len(asked))
        self._begun.release()
        assert (self.slow if may_read_trials else self.go).acquire(timeout=30)
        return [answer_of(one) if may_read_trials else self._answered(one) for one in asked]

    def answer_texts(
        self,
        texts: Sequence[str],
        *,
        cpu: Cpu,
        context: ExecutionContext,
        now: datetime,
        may_read_trials: bool,
    ) -> list[Answered]:
        """Return an answer to each problem of a batch."""
        assert (cpu, context, may_read_trials) == (CPU, CONTEXT, False)
        asked = [Asked.of(Problem.parse(text), cpu, context) for text in texts]
        return self.answer_each(asked, now, may_read_trials=may_read_trials)

    async def begins(self) -> None:
        """Wait until one more group, or slow question, is being answered."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=30)


def test_questions_that_come_while_others_are_answered_are_one_group() -> None:
    async def ask() -> None:
        desk = Desk()
        gathering = Gathering(desk)
        first = [asyncio.create_task(gathering.answer(asked_of(1)))]
        await desk.begins()
        first.append(asyncio.create_task(gathering.answer(asked_of(2))))
        await desk.begins()
        rest = [asyncio.create_task(gathering.answer(asked_of(n))) for n in range(3, 25)]
        await asyncio.sleep(0)

        for _group in range(4):
            desk.go.release()
        answers = await asyncio.gather(*first, *rest)

        assert desk.sizes[:2] == [1, 1]
        assert sorted(desk.sizes[2:]) == [6, 16]
        expected = [asked_of(n).problem.text.encode() for n in range(1, 25)]
        assert [answer.content for answer in answers] == expected

    asyncio.run(ask())


def test_who_asks_in_the_moment_in_which_all_groups_end_is_answered() -> None:
    async def ask() -> None:
        desk = Desk()
        gathering = Gathering(desk)

        async def ask_twice() -> None:
            await gathering.answer(asked_of(1))
            await gathering.answer(asked_of(2))

        twice = asyncio.create_task(ask_twice())
        await desk.begins()
        once = asyncio.create_task(gathering.answer(asked_of(3)))
        await desk.begins()
        for _group in range(3):
            desk.go.release()
        threading.Event().wait(0.2)  # both threads end before the loop hears of either

        async with asyncio.timeout(30):
            await asyncio.gather(twice, once)

    asyncio.run(ask())


def test_what_is_wrong_with_one_question_is_told_to_who_asked_it() -> None:
    def answered(asked: Asked) -> Answered:
        return InvalidProblem("no such thing") if asked.problem.n == 2 else answer_of(asked)

    async def ask() -> list[Answer | BaseException]:
        desk = Desk(answered)
        desk.go = threading.Semaphore(3)
        gathering = Gathering(desk)
        each = (gathering.answer(asked_of(n)) for n in (1, 2, 3))
        return await asyncio.gather(*each, return_exceptions=True)

    one, two, three = asyncio.run(ask())

    assert isinstance(one, Answer)
    assert isinstance(two, InvalidProblem)
    assert isinstance(three, Answer)


def test_a_fault_reaches_all_who_wait_and_ends_nothing() -> None:
    faults = 2

    def answered(asked: Asked) -> Answered:
        nonlocal faults
        faults -= 1
        if faults >= 0:
            raise OSError("no thread")
        return answer_of(asked)

    async def ask() -> None:
        desk = Desk(answered)
        desk.go = threading.Semaphore(3)
        gathering = Gathering(desk)
        for _time in range(2):
            with pytest.raises(OSError, match="no thread"):
                await gathering.answer(asked_of(1))
        assert (await gathering.answer(asked_of(1))).content

    asyncio.run(ask())


def test_slow_questions_hold_up_no_others() -> None:
    def answered(asked: Asked) -> Answered:
        return TrialsNeeded() if asked.problem.n <= 4 else answer_of(asked)

    async def ask() -> None:
        desk = Desk(answered)
        desk.go = threading.Semaphore(100)
        gathering = Gathering(desk)
        slow = [asyncio.create_task(gathering.answer(asked_of(n))) for n in range(1, 5)]

        async with asyncio.timeout(30):
            quick = await asyncio.gather(*(gathering.answer(asked_of(n)) for n in range(5, 40)))
            assert [one.content for one in quick] == [
                asked_of(n).problem.text.encode() for n in range(5, 40)
            ]
            assert not any(task.done() for task in slow)
            for _one in slow:
                desk.slow.release()
            assert len(await asyncio.gather(*slow)) == 4

    asyncio.run(ask())


def test_however_many_questions_are_slow_others_are_answered() -> None:
    def answered(asked: Asked) -> Answered:
        return TrialsNeeded() if asked.problem.n <= 64 else answer_of(asked)

    async def ask() -> None:
        desk = Desk(answered)
        desk.go = threading.Semaphore(1000)
        gathering = Gathering(desk)
        slow = [asyncio.create_task(gathering.answer(asked_of(n))) for n in range(1, 65)]
        texts = [asked_of(n).problem.text for n in range(1, 20)]
        batch = asyncio.create_task(gathering.answer_texts(texts, cpu=CPU, context=CONTEXT))
        await asyncio.sleep(0)

        try:
            async with asyncio.timeout(10):
                answer = await gathering.answer(asked_of(100))
        finally:
            for _one in range(64 + 19):
                desk.slow.release()
        assert answer == answer_of(asked_of(100))
        assert [one.content for one in await asyncio.gather(*slow)] == [
            answer_of(asked_of(n)).content for n in range(1, 65)
        ]
        assert await batch == [answer_of(asked_of(n)) for n in range(1, 20)]

    asyncio.run(ask())


def test_one_who_leaves_spoils_no_answer_of_others_and_is_not_asked_for() -> None:
    async def ask() -> None:
        desk = Desk()
        gathering = Gathering(desk)
        in_groups = [asyncio.create_task(gathering.answer(asked_of(1)))]
        await desk.begins()
        in_groups.append(asyncio.create_task(gathering.answer(asked_of(2))))
        await desk.begins()
        waiting = [asyncio.create_task(gathering.answer(asked_of(n))) for n in (3, 4, 5)]
        await asyncio.sleep(0)
        for left in (in_groups[0], waiting[0], waiting[2]):
            left.cancel()
        for _group in range(3):
            desk.go.release()

        async with asyncio.timeout(30):
            assert (await in_groups[1]).content == asked_of(2).problem.text.encode()
            assert (await waiting[1]).content == asked_of(4).problem.text.encode()
        assert desk.sizes == [1, 1, 1]

    asyncio.run(ask())


def test_who_finds_no_place_in_a_group_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gemm_tuner_service.answering.gathering._LONGEST_WAIT_S", 0.05)

    async def ask() -> None:
        desk = Desk()
        gathering = Gathering(desk)
        stuck = []
        for n in (1, 2):
            stuck.append(asyncio.create_task(gathering.answer(asked_of(n))))
            await desk.begins()
        with pytest.raises(StoreFailed, match="did not answer others"):
            await gathering.answer(asked_of(3))
        for _group in range(2):
            desk.go.release()
        assert len(await asyncio.gather(*stuck)) == 2  # no patience is lost in a group
        assert desk.sizes == [1, 1]

    asyncio.run(ask())


@pytest.fixture
def resolver(settings: Settings, repository: Repository) -> Resolver:
    return Resolver(
        repository=repository,
        key_pair=KeyPair.load_or_create(settings.signing_key_path),
        lifetime=timedelta(days=7),
        answers=Answers(lambda: 1),
        count_miss=lambda _asked: None,
    )


def contents(answered: Sequence[Answered]) -> list[bytes | type[Exception]]:
    return [one.content if isinstance(one, Answer) else type(one) for one in answered]


def test_answers_of_a_group_are_those_of_each_question_alone(
    resolver: Resolver, engine: Engine
) -> None:
    statements: list[str] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _u, text, *_rest: statements.append(text)
    )
    nothing = Asked.of(Problem.parse("f32 0x16x16"), CPU, CONTEXT)
    asked = [Asked.of(PROBLEM, CPU, CONTEXT), asked_of(8), nothing, asked_of(8)]

    together = resolver.answer_each(asked, NOW, may_read_trials=False)
    assert len([one for one in statements if " asked" in one]) == 1

    alone = [resolver._each_anew([one], NOW, may_read_trials=True)[0] for one in asked]
    assert contents(together) == contents(alone)
    assert contents(together)[2] is InvalidProblem


def test_a_question_for_which_trials_must_be_read_is_told_apart(
    resolver: Resolver, repository: Repository
) -> None:
    other = replace(PROBLEM, n=64)
    repository.add_trial(replace(make_trial(), problem=other, stage=Stage.RACE))
    asked = [Asked.of(problem, CPU, CONTEXT) for problem in (PROBLEM, other)]

    quickly = resolver.answer_each(asked, NOW, may_read_trials=False)
    thoroughly = resolver.answer_each(asked, NOW)

    assert contents(quickly)[1] is TrialsNeeded
    assert quickly[0] == thoroughly[0]
    assert isinstance(thoroughly[1], Answer)
    assert b"candidate was tried there" in thoroughly[1].content


@of_any_type
@pytest.mark.parametrize(
    "change",
    [
        "update verdicts set serial = 'x'",
        "update verdicts set document = x'00'",
        "update verdicts set document = cast(x'ff' as text)",
    ],
)
def test_a_damaged_row_spoils_the_answer_of_its_problem_alone(
    resolver: Resolver, engine: Engine, change: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text("update verdicts set answer = null"))
        connection.execute(text(change))
    asked = [asked_of(8), Asked.of(PROBLEM, CPU, CONTEXT), asked_of(24)]

    answered = resolver.answer_each(asked, NOW, may_read_trials=False)

    assert [isinstance(one, Answer) for one in answered] == [True, False, True]
    assert contents(answered)[1] in {RowsDamaged, TrialsNeeded}
    with pytest.raises(StoreFailed):
        resolver.answer(asked[1], NOW)


@of_any_type
def test_a_damaged_description_of_an_artifact_is_not_believed(
    resolver: Resolver, engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(text("update verdicts set answer = null"))
        connection.execute(text("update artifacts set document = x'00'"))

    answer = resolver.answer(Asked.of(PROBLEM, CPU, CONTEXT), NOW)

    assert b'"decision":"baseline"' in answer.content
    assert b"the database was changed" in answer.content


def test_a_database_that_fails_is_asked_once_for_a_batch(
    resolver: Resolver, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = 0

    def fail(_questions: object) -> None:
        nonlocal asks
        asks += 1
        raise StoreFailed("the database does not answer")

    monkeypatch.setattr(type(repository), "ready_each", lambda _self, each: fail(each))
    texts = [replace(PROBLEM, n=8 * n).text for n in range(1, 1000)]

    with pytest.raises(StoreFailed, match="does not answer"):
        resolver.answer_texts(texts, cpu=CPU, context=CONTEXT, now=NOW)

    assert asks == 1


def test_many_at_once_get_the_answers_to_their_own_questions(client: httpx.Client) -> None:
    problems = [replace(PROBLEM, m=Rows(low=m, high=m)).text for m in range(1000, 1100)]
    found: dict[str, str] = {}

    def ask(some: Sequence[str]) -> None:
        for problem in some:
            answer = client.post("/v1/resolve", json={"problem": problem})
            found[problem] = answer.json()["verdict"]["problem"]

    threads = [threading.Thread(target=ask, args=(problems[n::10],)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert found == {problem: problem for problem in problems}
