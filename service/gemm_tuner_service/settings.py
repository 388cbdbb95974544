"""The settings of a service."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gemm_tuner.domain.cpu import Cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one service.

    `default_cpu` answers for callers that name no CPU; the service detects none itself. A verdict
    is issued for the whole day on which it is asked for, so that repeated answers are the same
    bytes, and holds for `verdict_lifetime` from the start of that day.
    """

    database_url: str
    signing_key_path: Path
    default_cpu: Cpu | None = None
    verdict_lifetime: timedelta = timedelta(days=7)
