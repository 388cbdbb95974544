"""From a problem to a signed answer."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.tunable import is_tunable
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidInput
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import sign_verdict
from gemm_tuner_service.answers import Answer, Answers, Asked
from gemm_tuner_service.problems import describe
from gemm_tuner_service.schemas import BatchItem, Resolution, VerdictView


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
        """

        def make() -> Answer:
            return self.answer_anew(asked, now)

        answer = self.answers.get(asked.key, now.astimezone(UTC).date(), make)
        self._count(asked, answer)
        return answer

    def answer_anew(self, asked: Asked, now: datetime) -> Answer:
        """Return the bytes of the answer to a question, whatever is in memory, and count nothing.

        Raises:
            InvalidProblem: the problem multiplies nothing.
        """
        match = choose(self.repository, asked.problem, cpu=asked.cpu, context=asked.context)
        resolution = self._signed(match.verdict, match.explain, now, match.serial)
        return Answer.of(
            resolution, is_lasting=match.is_lasting, is_measured=_is_measured(match.verdict)
        )

    def resolve_each(
        self, texts: Sequence[str], *, cpu: Cpu, context: ExecutionContext, now: datetime
    ) -> Iterator[bytes]:
        """Yield a `BatchItem` in JSON for each problem: its answer, or what is wrong with it."""
        for text in texts:
            try:
                answer = self.answer(Asked.of(Problem.parse(text), cpu, context), now)
            except InvalidInput as error:
                yield BatchItem(problem=text, error=describe(error)).model_dump_json().encode()
            else:
                yield b'{"problem":%b,"resolution":%b,"error":null}' % (
                    json.dumps(text).encode(),
                    answer.content,
                )

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
        problems = [Problem.parse(text) for text in texts]
        sharing = share(self.repository, problems, cpu=cpu, context=context, max_loss=max_loss)
        for text, one in zip(texts, sharing.kernels, strict=True):
            verdict = one.chosen.verdict
            if not _is_measured(verdict):
                self.count_miss(Asked.of(verdict.problem, cpu, context))
            resolution = self._signed(verdict, one.explain, now, sharing.serial)
            yield BatchItem(problem=text, resolution=resolution).model_dump_json().encode()

    def _count(self, asked: Asked, answer: Answer | None) -> None:
        """Count a question for which nothing was measured."""
        if answer is not None and not answer.is_measured:
            self.count_miss(asked)

    def _signed(
        self, verdict: Verdict, explain: Sequence[str], now: datetime, serial: int
    ) -> Resolution:
        issued_at = datetime.combine(now.astimezone(UTC), time.min, tzinfo=UTC)
        payload = VerdictPayload.of(
            verdict,
            issued_at=issued_at,
            expires_at=issued_at + self.lifetime,
            serial=serial,
        )
        return Resolution(
            signed=sign_verdict(payload.to_bytes(), self.key_pair),
            verdict=VerdictView.of(verdict),
            explain=list(explain),
        )


def _is_measured(verdict: Verdict) -> bool:
    """Return whether a verdict rests on what was measured, and not on a guess or in vain."""
    return not is_tunable(verdict.basis, verdict.doubt)
