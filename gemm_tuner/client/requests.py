"""What a client sends to its service for a question, and the name that the answer is kept under."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gemm_tuner.client.question import LayerQuestion, Question
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.wire import WireCpu


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

    def name(self, request: dict[str, Any], *more: str) -> str:
        """Return the name that the answer to a request is kept under; `more` tells it apart."""
        return identity([self.url, request, *more])

    def _where(self, context: ExecutionContext) -> dict[str, Any]:
        return {
            "cpu": WireCpu.of(self.cpu).model_dump(mode="json"),
            "threads": context.threads,
            "regime": context.regime.value,
        }
