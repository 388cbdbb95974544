"""Hosts that measure for one database, each with a key of its own."""

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine

from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.attestation import MeasuringKeys


class Hosts:
    """Some hosts by name, and the database that they share; each believes all others."""

    def __init__(self, engine: Engine, folder: Path, names: Sequence[str]) -> None:
        self._engine = engine
        self._folder = folder
        self._keys = {name: MeasuringKeys(folder / name) for name in names}
        self.believe_all()

    def __call__(self, name: str, *, quorum: int | None = None) -> Repository:
        """Return the database as a host reads and writes it."""
        return Repository(self._engine, self._keys[name], quorum=quorum)

    def jobs(self, name: str) -> Jobs:
        """Return the jobs as a host sees them."""
        return Jobs(self._engine, self._keys[name])

    def key(self, name: str) -> str:
        """Return the public key of a host, in hex."""
        return self._keys[name].own_made()

    def forget(self, name: str) -> None:
        """Let no other host believe this one any more."""
        for other, keys in self._keys.items():
            if other != name:
                keys.forget(self.key(name))

    def believe_all(self) -> None:
        """Let each host believe all others."""
        for name, keys in self._keys.items():
            for other in self._keys.keys() - {name}:
                keys.accept(self.key(other))

    def forget_all(self) -> None:
        """Let no host believe another."""
        for name in self._keys:
            self.forget(name)

    def stranger(self) -> Repository:
        """Return the database as somebody writes it whom nobody believes."""
        return Repository(self._engine, MeasuringKeys(self._folder / "stranger"))
