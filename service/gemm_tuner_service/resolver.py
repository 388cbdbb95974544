"""From a problem to a signed answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidInput
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import sign_verdict
from gemm_tuner_service.problems import describe
from gemm_tuner_service.schemas import BatchItem, Resolution, VerdictView


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Chooses kernels from a store, and signs what it answers.

    An answer is issued for the whole day on which it is asked for, and holds for `lifetime` from
    the start of that day.
    """

    repository: Repository
    key_pair: KeyPair
    lifetime: timedelta

    def resolve(
        self, problem: Problem, *, cpu: Cpu, context: ExecutionContext, now: datetime
    ) -> Resolution:
        """Return the answer for `problem`.

        Raises:
            InvalidProblem: the problem multiplies nothing.
        """
        # Taken before the choice: a verdict made of later trials never looks older than it is.
        serial = self.repository.newest_trial(problem)
        match = choose(self.repository, problem, cpu=cpu, context=context)
        return self._signed(match.verdict, match.explain, now, serial)

    def resolve_each(
        self, texts: Sequence[str], *, cpu: Cpu, context: ExecutionContext, now: datetime
    ) -> list[BatchItem]:
        """Return the answer for each problem, or what is wrong with it."""

        def item(text: str) -> BatchItem:
            try:
                resolution = self.resolve(Problem.parse(text), cpu=cpu, context=context, now=now)
            except InvalidInput as error:
                return BatchItem(problem=text, error=describe(error))
            return BatchItem(problem=text, resolution=resolution)

        return [item(text) for text in texts]

    def resolve_layer(
        self,
        texts: Sequence[str],
        *,
        cpu: Cpu,
        context: ExecutionContext,
        max_loss: float,
        now: datetime,
    ) -> list[BatchItem]:
        """Return the answers for problems that are to share packed weights.

        Raises:
            InvalidInput: one is not understood, they differ in more than m, or are too many.
        """
        problems = [Problem.parse(text) for text in texts]
        serial = self.repository.newest_trial(problems[0]) if problems else 0
        sharing = share(self.repository, problems, cpu=cpu, context=context, max_loss=max_loss)
        return [
            BatchItem(
                problem=text,
                resolution=self._signed(one.chosen.verdict, one.explain, now, serial),
            )
            for text, one in zip(texts, sharing.kernels, strict=True)
        ]

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
