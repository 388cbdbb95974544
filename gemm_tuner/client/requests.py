"""What a client sends to its service for a question, and the name that the answer is kept under."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemm_tuner.client.answer import Answer, parse_answers
from gemm_tuner.client.question import LayerQuestion, Question
from gemm_tuner.client.transport import Session
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.wire.record import WireCpu

MAX_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The bodies of requests to the service at one address, for one CPU."""

    url: str
    cpu: Cpu

    def of_question(self, question: Question) -> dict[str, Any]:
        """Return the body of `POST /v1/resolve`."""
        return {"problem": question.problem.text, **self._where(question.context)}

    def of_many(self, problems: Iterable[Problem], context: ExecutionContext) -> dict[str, Any]:
        """Return the body of `POST /v1/resolve:batch`."""
        return {"problems": [problem.text for problem in problems], **self._where(context)}

    def of_layer(self, question: LayerQuestion) -> dict[str, Any]:
        """Return the body of `POST /v1/resolve:batch` whose problems shall share weights."""
        batch = self.of_many(question.problems, question.context)
        return {**batch, "max_loss": question.max_loss}

    def answers(self, session: Session, questions: Sequence[Question]) -> dict[Question, Answer]:
        """Return the answers to questions of one context, a batch of which is asked at once.

        What met an error of its own is left out: it is asked alone, and then tells it.

        Raises:
            ServiceFailed: the service refuses, or does not answer.
            SignatureInvalid: an answer is none.
        """
        answers: dict[Question, Answer] = {}
        for start in range(0, len(questions), MAX_BATCH):
            batch = questions[start : start + MAX_BATCH]
            request = self.of_many([one.problem for one in batch], batch[0].context)
            found = parse_answers(session.resolve_batch(request), len(batch))
            each = zip(batch, found, strict=True)
            answers |= {one: answer for one, answer in each if answer is not None}
        return answers

    def name(self, request: dict[str, Any], *more: str) -> str:
        """Return the name that the answer to a request is kept under; `more` tells it apart."""
        return identity([self.url, request, *more])

    def _where(self, context: ExecutionContext) -> dict[str, Any]:
        return {
            "cpu": WireCpu.of(self.cpu).model_dump(mode="json"),
            "threads": context.threads,
            "regime": context.regime.value,
        }
