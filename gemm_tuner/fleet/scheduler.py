"""Where the scheduler of a fleet listens, and the files by which both sides prove who they are."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from gemm_tuner.errors import InvalidSetting

_LOOPBACK_NAME = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentity:
    """The certificates of whom to believe, and the own certificate with its key: files in PEM."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """The address of a scheduler, and the identity that is shown to it: none on loopback alone.

    Raises:
        InvalidSetting: the address is none, or others could read what is sent there, or pretend to
            be the scheduler, which may run any code on its workers.
    """

    address: str
    tls: TlsIdentity | None = None

    def __post_init__(self) -> None:
        """Check the address, and that it is a safe one."""
        parts = _parts_of(self.address)
        if parts is None or parts.scheme not in {"tcp", "tls"}:
            raise InvalidSetting(
                f"scheduler {self.address[:80]!r} is no address; write it as tls://HOST:PORT."
            )
        if parts.scheme == "tcp" and not self.is_local:
            raise InvalidSetting(
                f"scheduler {self.address} is on another machine, and whoever is between could run "
                "code on the workers; use tls:// with --tls-ca, --tls-cert and --tls-key."
            )
        if (parts.scheme == "tls") != (self.tls is not None):
            raise InvalidSetting(
                f"scheduler {self.address} and the files of TLS do not go together; give tls:// "
                "with --tls-ca, --tls-cert and --tls-key, or, on this machine, tcp:// alone."
            )

    @property
    def host(self) -> str:
        """Return the name or the IP address of its machine."""
        return urlsplit(self.address).hostname or ""

    @property
    def is_local(self) -> bool:
        """Return whether it is reached by a loopback address."""
        if self.host == _LOOPBACK_NAME:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def scheduler_of(
    address: str, *, authority: Path | None, certificate: Path | None, key: Path | None
) -> Scheduler:
    """Return the scheduler that options name.

    Raises:
        InvalidSetting: as `Scheduler` does; or some files of TLS are given and others are not, or
            one cannot be read.
    """
    files = (authority, certificate, key)
    if not any(files):
        return Scheduler(address=address)
    if authority is None or certificate is None or key is None:
        raise InvalidSetting(
            "the files of TLS are not complete; give --tls-ca, --tls-cert and --tls-key."
        )
    for file in (authority, certificate, key):
        _check_readable(file)
    return Scheduler(
        address=address, tls=TlsIdentity(authority=authority, certificate=certificate, key=key)
    )


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise InvalidSetting(
            f"{file} cannot be read ({error.strerror}); name a file in PEM, or correct its mode."
        ) from None


def _parts_of(address: str) -> SplitResult | None:
    """Return the parts of an address that has a port, None if it is none."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    return None if port is None else parts
