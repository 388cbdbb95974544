"""From a problem to a signed answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from pydantic_core import to_json

from gemm_tuner.answer.document import Signing, Unsigned
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.quorum import lacks_hosts
from gemm_tuner.domain.tunable import is_tunable
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidInput
from gemm_tuner.select.choose import match
from gemm_tuner.select.lookup import Question
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.statements import RowsDamaged
from gemm_tuner.store.verdicts.asking import Found, ReadyAnswer
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner_service.answering.answers import Answer, Answers, Asked, Key
from gemm_tuner_service.answering.questions import problem_in
from gemm_tuner_service.problems import describe
from gemm_tuner_service.schemas import BatchItem

Answered = Answer | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Chooses kernels from a store, signs what it answers, and counts what was not measured.

    An answer is issued for the whole day on which it is asked for, and holds for `lifetime` from
    the start of that day.
    """

    repository: Repository
    key_pair: KeyPair
    lifetime: timedelta
    answers: Answers
    count_miss: Callable[[Asked], None]

    def known_answer(self, asked: Asked, now: datetime) -> Answer | None:
        """Return the bytes of an answer that is in memory, without waiting for anything."""
        known = self.answers.known(asked.key, now.astimezone(UTC).date())
        self._count(asked, known)
        return known

    def answer(self, asked: Asked, now: datetime) -> Answer:
        """Return the bytes of the answer to a question, from memory where they are known.

        Raises:
            InvalidProblem: the problem multiplies nothing.
            StoreFailed: the database does not answer, or a row of it is damaged.
        """
        return _only(self.answer_each([asked], now))

    def answer_anew(self, asked: Asked, now: datetime, *, may_read_trials: bool = True) -> Answer:
        """Return the bytes of the answer to a question, whatever is in memory, and count nothing.

        Raises:
            InvalidProblem: the problem multiplies nothing.
            StoreFailed: the database does not answer, or a row of it is damaged.
            TrialsNeeded: trials must be read, and may not be.
        """
        return _only(self._each_anew([asked], now, may_read_trials=may_read_trials))

    def answer_each(
        self, asked: Sequence[Asked], now: datetime, *, may_read_trials: bool = True
    ) -> list[Answered]:
        """Return the answers to some questions, or what is wrong with them.

        The store is asked for all together that are not in memory. A question for which trials must
        be read, and may not be, is answered with `TrialsNeeded`.

        Raises:
            StoreFailed: the database does not answer.
        """
        wrong: dict[Key, Exception] = {}
        by_key = {one.key: one for one in asked}

        def make(missing: Sequence[Key]) -> dict[Key, Answer]:
            made: dict[Key, Answer] = {}
            each = [by_key[key] for key in missing]
            answered = self._each_anew(each, now, may_read_trials=may_read_trials)
            for key, one in zip(missing, answered, strict=True):
                if isinstance(one, Answer):
                    made[key] = one
                else:
                    wrong[key] = one
            return made

        answers = self.answers.get_each(by_key, now.astimezone(UTC).date(), make)
        for one in asked:
            self._count(one, answers.get(one.key))
        return [answers.get(one.key) or wrong[one.key] for one in asked]

    def answer_texts(
        self,
        texts: Sequence[str],
        *,
        cpu: Cpu,
        context: ExecutionContext,
        now: datetime,
        may_read_trials: bool = True,
    ) -> list[Answered]:
        """Return the answer to each problem, or what is wrong with it, as `answer_each` does.

        Raises:
            StoreFailed: the database does not answer.
        """
        parsed = [_parsed(text) for text in texts]
        problems = [one for one in parsed if isinstance(one, Problem)]
        asked = list(Asked.each(problems, cpu, context))
        answered = iter(self.answer_each(asked, now, may_read_trials=may_read_trials))
        return [next(answered) if isinstance(one, Problem) else one for one in parsed]

    def resolve_layer(
        self,
        texts: Sequence[str],
        *,
        cpu: Cpu,
        context: ExecutionContext,
        max_loss: float,
        now: datetime,
    ) -> Iterator[bytes]:
        """Yield a `BatchItem` in JSON for each of some problems that are to share packed weights.

        Raises:
            InvalidInput: one is not understood, they differ in more than m, or are too many.
        """
        problems, signing = [Problem.parse(text) for text in texts], self._signing(now)
        sharing = share(self.repository, problems, cpu=cpu, context=context, max_loss=max_loss)
        for text, one in zip(texts, sharing.kernels, strict=True):
            verdict = one.chosen.verdict
            if not _is_measured(verdict):
                self.count_miss(Asked.of(verdict.problem, cpu, context))
            content = signing.document(Unsigned.of(verdict, one.explain), sharing.serial)
            yield batch_item(text, Answer.of(content))

    def _count(self, asked: Asked, answer: Answer | None) -> None:
        """Count a question for which nothing was measured."""
        if answer is not None and not answer.is_measured:
            self.count_miss(asked)

    def _each_anew(
        self, each: Sequence[Asked], now: datetime, *, may_read_trials: bool
    ) -> list[Answered]:
        """Return the answers to some questions, for all of which the store is asked once."""
        try:
            ready = self.repository.ready_each((one.problem, one.cpu, one.context) for one in each)
        except RowsDamaged as error:
            if len(each) == 1:
                return [error]
            # A text that is none: it spoils the query of those who asked with it.
            middle = len(each) // 2
            return [
                answered
                for half in (each[:middle], each[middle:])
                for answered in self._each_anew(half, now, may_read_trials=may_read_trials)
            ]
        signing = self._signing(now)
        return [
            self._matched(one, signing, may_read_trials=may_read_trials)
            if isinstance(one, Found)
            else _of_ready(one, signing)
            for one in ready
        ]

    def _matched(self, found: Found, signing: Signing, *, may_read_trials: bool) -> Answered:
        try:
            known = self.repository.known_of(found)
            question = Question(
                store=self.repository,
                problem=found.problem,
                cpu=found.cpu,
                context=found.context,
                known=known,
                may_read_trials=may_read_trials,
            )
            best = match(question)
            content = signing.document(Unsigned.of(best.verdict, best.explain), best.serial)
        except Exception as error:  # noqa: BLE001 - it is the answer to this question alone
            return error
        return Answer.of(
            content, is_lasting=best.is_lasting, is_measured=_is_measured(best.verdict)
        )

    def _signing(self, now: datetime) -> Signing:
        """Return what signs answers of the day that it is."""
        issued_at = datetime.combine(now.astimezone(UTC), time.min, tzinfo=UTC)
        return Signing(self.key_pair, issued_at=issued_at, expires_at=issued_at + self.lifetime)


def _parsed(text: str) -> Problem | InvalidInput:
    try:
        return problem_in(text)
    except InvalidInput as error:
        return error


def batch_item(text: str, answered: Answered) -> bytes:
    """Return the `BatchItem` in JSON of a problem: its answer, or what is wrong with it.

    Raises:
        StoreFailed: the answer is that, or another fault which is not of the problem.
    """
    if isinstance(answered, InvalidInput):
        return BatchItem(problem=text, error=describe(answered)).model_dump_json().encode()
    if isinstance(answered, Exception):
        raise answered
    return b'{"problem":%b,"resolution":%b,"error":null}' % (to_json(text), answered.content)


def _of_ready(ready: ReadyAnswer, signing: Signing) -> Answer:
    content = signing.document(Unsigned.unpacked(ready.content), ready.serial)
    return Answer.of(content, is_lasting=True)


def _only(answered: Sequence[Answered]) -> Answer:
    """Return the answer to the only question, or raise what is wrong with it."""
    [one] = answered
    if isinstance(one, Exception):
        raise one
    return one


def _is_measured(verdict: Verdict) -> bool:
    """Return whether a verdict rests on what was measured, and not on a guess or in vain.

    It does not where another host could bring what the quorum asks for.
    """
    return not (is_tunable(verdict.basis, verdict.doubt) or lacks_hosts(verdict))
