"""The scheduler of a fleet, as the options of a command name it."""

from pathlib import Path

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.fleet.scheduler import Scheduler, scheduler_of


def fleet_of(
    address: str | None, authority: Path | None, certificate: Path | None, key: Path | None
) -> Scheduler | None:
    """Return the scheduler that `--scheduler` and the files of TLS name; None without one.

    Raises:
        InvalidSetting: they cannot be used, or there are files and no scheduler.
    """
    if address is None:
        if authority or certificate or key:
            raise InvalidSetting("--tls-ca, --tls-cert and --tls-key are for --scheduler; add it.")
        return None
    return scheduler_of(address, authority=authority, certificate=certificate, key=key)
