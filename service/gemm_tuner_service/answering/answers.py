"""Questions, and signed answers in memory: what was answered today is not signed again."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from threading import Lock
from typing import Self, TypeVar

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem

MAX_ANSWERS = 8192
MAX_ANSWER_BYTES = 2**15

# A problem, the CPU that asks with its features, threads and regime.
Key = tuple[str, str, frozenset[str], int, str]

AnyQuestion = TypeVar("AnyQuestion", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A problem for a CPU and context; `key` names it among answers."""

    problem: Problem
    cpu: Cpu
    context: ExecutionContext
    key: Key

    @classmethod
    def of(cls, problem: Problem, cpu: Cpu, context: ExecutionContext) -> Self:
        """Return the question with its key."""
        [asked] = cls.each([problem], cpu, context)
        return asked

    @classmethod
    def each(
        cls, problems: Iterable[Problem], cpu: Cpu, context: ExecutionContext
    ) -> Iterator[Self]:
        """Yield questions that differ in the problem alone."""
        where = (cpu.exact_key, cpu.isa, context.threads, context.regime.value)
        for problem in problems:
            yield cls(problem=problem, cpu=cpu, context=context, key=(problem.text, *where))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The bytes of an answer and its entity tag; it `is_lasting` until verdicts change.

    Where it is a verdict, `is_measured` says whether it rests on what was measured for it.
    """

    content: bytes
    tag: str
    is_lasting: bool
    is_measured: bool = True

    @classmethod
    def of(cls, content: bytes, *, is_lasting: bool = False, is_measured: bool = True) -> Self:
        """Return the bytes of a document as an answer."""
        tag = f'"{sha256(content).hexdigest()}"'
        return cls(content=content, tag=tag, is_lasting=is_lasting, is_measured=is_measured)


class Answers:
    """The answers of one process that were asked for last, at most `MAX_ANSWERS`.

    An answer is used again while `state` returns what it did when the answer was made, on the day
    that it was issued; so its signature holds for all but a day of its lifetime. `state_at_once`
    returns the same without waiting, or None where it cannot. An answer of more than
    `longest_bytes` is made anew each time.
    """

    def __init__(
        self,
        state: Callable[[], object | None],
        state_at_once: Callable[[], object | None] = lambda: None,
        *,
        longest_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._state = state
        self._state_at_once = state_at_once
        self._longest_bytes = longest_bytes
        self._lock = Lock()
        self._made_in: tuple[object, date] | None = None
        self._answers: OrderedDict[Hashable, Answer] = OrderedDict()

    def known(self, question: Hashable, today: date) -> Answer | None:
        """Return the answer to a question without waiting, None if it is not known at once."""
        state = self._state_at_once()
        if state is None:
            return None
        with self._lock:
            if self._made_in != (state, today):
                return None
            known = self._answers.get(question)
            if known is not None:
                self._answers.move_to_end(question)
            return known

    def get(self, question: Hashable, today: date, make: Callable[[], Answer]) -> Answer:
        """Return the answer to a question, made anew where it is not known or not sure."""
        return self.get_each([question], today, lambda _missing: {question: make()})[question]

    def get_each(
        self,
        questions: Collection[AnyQuestion],
        today: date,
        make: Callable[[Sequence[AnyQuestion]], Mapping[AnyQuestion, Answer]],
    ) -> dict[AnyQuestion, Answer]:
        """Return the answers to some questions.

        `make` returns those to some that are not known or not sure; it may leave some out.
        """
        state = self._state()  # before the answers: what changes while they are made shows later
        made_in = (state, today)
        with self._lock:
            if self._made_in != made_in:
                self._answers.clear()
                self._made_in = made_in
            known = {one: self._answers[one] for one in questions if one in self._answers}
            for one in known:
                self._answers.move_to_end(one)
        missing = [one for one in dict.fromkeys(questions) if one not in known]
        if not missing:
            return known
        made = make(missing)
        if state is not None:
            with self._lock:
                if self._made_in == made_in:
                    self._keep(made)
        return {**known, **made}

    def _keep(self, answers: Mapping[AnyQuestion, Answer]) -> None:
        for question, answer in answers.items():
            if answer.is_lasting and len(answer.content) <= self._longest_bytes:
                self._answers[question] = answer
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
