"""The settings of a service."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.estimate import Estimator
from gemm_tuner_service.clients.client_limits import PER_SECOND
from gemm_tuner_service.clients.peers import NO_PROXIES, Proxies


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one service.

    `default_cpu` answers for callers that name no CPU; the service detects none itself. A verdict
    is issued for the whole day on which it is asked for, so that repeated answers are the same
    bytes, and holds for `verdict_lifetime` from the start of that day. `proxies` are
    believed when they say who asks. One client may ask for `client_rate` problems a second.
    `estimate` tells how long a job takes; without it, nobody can tell. A kernel is served once
    so many hosts found the same as the `quorum` says.
    """

    database_url: str
    signing_key_path: Path
    default_cpu: Cpu | None = None
    verdict_lifetime: timedelta = timedelta(days=7)
    proxies: Proxies = NO_PROXIES
    client_rate: float = PER_SECOND
    estimate: Estimator | None = None
    quorum: int = 1
