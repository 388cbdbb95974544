"""What the endpoints are given: the store, the key and the settings of the running service."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy import Engine

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature, parse_isa
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import sign_verdict
from gemm_tuner_service.schemas import CpuDescription, Resolution, VerdictView
from gemm_tuner_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """The parts of a service that is up."""

    settings: Settings
    engine: Engine
    repository: Repository
    key_pair: KeyPair

    def described_cpu(self, description: CpuDescription | None) -> Cpu:
        """Return the CPU that a caller described, or the default.

        Raises:
            InvalidSetting: there is neither.
        """
        return description.to_domain() if description else self._default_cpu()

    def named_cpu(self, exact_key: str | None, isa: str | None) -> Cpu:
        """Return the CPU with this key, or the default, cut down to the features in `isa`.

        Raises:
            InvalidSetting: the key or a feature is not known, or there is no default.
        """
        cpu = self.repository.cpu(exact_key) if exact_key else self._default_cpu()
        if cpu is None:
            raise InvalidSetting(
                f"CPU {exact_key!r} is not in this store; "
                "describe it in a POST to /v1/resolve, or leave cpu out for the service's own."
            )
        return cpu if isa is None else replace(cpu, isa=cpu.isa & _parse_known_isa(isa))

    def resolve(
        self, problem: Problem, *, cpu: Cpu, context: ExecutionContext, now: datetime
    ) -> Resolution:
        """Return the answer for `problem`, signed."""
        match = choose(self.repository, problem, cpu=cpu, context=context)
        return self._signed(match.verdict, match.explain, now)

    def resolve_layer(
        self,
        problems: Sequence[Problem],
        *,
        cpu: Cpu,
        context: ExecutionContext,
        max_loss: float,
        now: datetime,
    ) -> list[Resolution]:
        """Return the answers, signed, for problems that are to share packed weights.

        Raises:
            InvalidSetting: they differ in more than m, or are too many.
        """
        sharing = share(self.repository, problems, cpu=cpu, context=context, max_loss=max_loss)
        return [self._signed(one.chosen.verdict, one.explain, now) for one in sharing.kernels]

    def _signed(self, verdict: Verdict, explain: Sequence[str], now: datetime) -> Resolution:
        issued_at = datetime.combine(now.astimezone(UTC), time.min, tzinfo=UTC)
        payload = VerdictPayload.of(
            verdict, issued_at=issued_at, expires_at=issued_at + self.settings.verdict_lifetime
        )
        return Resolution(
            signed=sign_verdict(payload.to_bytes(), self.key_pair),
            verdict=VerdictView.of(verdict),
            explain=list(explain),
        )

    def _default_cpu(self) -> Cpu:
        if self.settings.default_cpu is None:
            raise InvalidSetting(
                "no CPU was named and this service has no default; add cpu to the request."
            )
        return self.settings.default_cpu


def running_service(request: Request) -> RunningService:
    """Return the service that answers `request`."""
    return cast("RunningService", request.app.state.service)


Service = Annotated[RunningService, Depends(running_service)]


def _parse_known_isa(text: str) -> frozenset[IsaFeature]:
    names = [name.strip() for name in text.split(",")]
    features = parse_isa(names)
    unknown = [name for name in names if name and name not in features]
    if unknown:
        known = ", ".join(feature.value for feature in IsaFeature)
        raise InvalidSetting(f"CPU feature {unknown[0]!r} is not known; use some of: {known}.")
    return features
