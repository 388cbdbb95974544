"""The lock file of a project: which kernel each problem gets, for the project's version control.

It is JSON Lines in a stable order: the version of the form first, then a line for each problem, so
that another kernel for one problem changes one line.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, ValidationError

from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.errors import InvalidInput, InvalidSetting, NotLocked
from gemm_tuner.files import read_bounded
from gemm_tuner.trust.payload import SignedArtifact, VerdictPayload
from gemm_tuner.user_file import user_file

LOCK_FILE = Path("gemm-tuner.lock")

Place = tuple[str, str, int, str]  # problem, CPU, threads, regime

_FIRST_LINE = '{"gemm_tuner_lock":1}'
_MAX_FILE_BYTES = 2**24
_OF_A_MERGE = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")


class LockedKernel(BaseModel):
    """What answers one question, and the key that signed it; without `artifact`, the baseline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problem: str
    cpu_key: str
    threads: int
    regime: Regime
    decision: Decision
    basis: Basis
    complete: bool
    candidate: str | None
    artifact: SignedArtifact | None
    key_id: str

    @classmethod
    def of(cls, verdict: VerdictPayload, key_id: str) -> "LockedKernel":
        """Return what locks a verdict that was checked."""
        facts = {name: getattr(verdict, name) for name in cls.model_fields if name != "key_id"}
        return cls(**facts, key_id=key_id)

    @property
    def place(self) -> Place:
        """Return the question that this answers."""
        return (self.problem, self.cpu_key, self.threads, self.regime.value)

    def verdict(self) -> VerdictPayload:
        """Return the verdict that was locked, which does not expire."""
        facts = {name: getattr(self, name) for name in LockedKernel.model_fields}
        del facts["key_id"]
        return VerdictPayload(
            **facts,
            ratio=None,
            issued_at=datetime.now(UTC),
            expires_at=datetime.max.replace(tzinfo=UTC),
            serial=0,
        )


def read_lock(path: Path) -> Mapping[Place, LockedKernel]:
    """Return what a lock file locks.

    Raises:
        InvalidSetting: it cannot be read, holds an unfinished merge, or is no lock file of this
            version.
    """
    try:
        lines = read_bounded(path, _MAX_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(
            f'the lock file {path} cannot be read: {error}; "gemm-tuner lock" writes one.'
        ) from None
    for number, line in enumerate(lines, start=1):
        if line.startswith(_OF_A_MERGE):
            raise InvalidSetting(
                f"{path}, line {number}, is of a merge that is not finished: {line[:40]!r}; keep "
                'one of the two sides, or run "gemm-tuner lock" again.'
            )
    if not lines or lines[0] != _FIRST_LINE:
        said = lines[0][:60] if lines else ""
        raise InvalidSetting(
            f"{path} begins with {said!r}, not with {_FIRST_LINE!r}: it is no lock file of this "
            'version; run "gemm-tuner lock" again.'
        )
    found: dict[Place, LockedKernel] = {}
    for number, line in enumerate(lines[1:], start=2):
        locked = _parse(line, f"{path}, line {number}")
        if locked.place in found:
            raise InvalidSetting(
                f"{path}, line {number}: {locked.problem!r} is locked twice for the same CPU, "
                "threads and regime; keep one of the lines."
            )
        found[locked.place] = locked
    return MappingProxyType(found)


def not_locked(path: Path, place: Place) -> NotLocked:
    """Return the error that a lock file names nothing for a question."""
    problem, cpu_key, threads, regime = place
    return NotLocked(
        f"{path} names nothing for {problem!r} on {cpu_key} with {threads} threads, {regime}, "
        'and nothing else may be used; run "gemm-tuner lock" here, or ask without frozen.'
    )


def write_lock(path: Path, kernels: Iterable[LockedKernel]) -> None:
    """Write a lock file, whole or not at all.

    Raises:
        InvalidSetting: it cannot be written.
    """
    content = lock_text(kernels).encode()
    with user_file(path) as file:
        file.write(content)


def lock_text(kernels: Iterable[LockedKernel]) -> str:
    """Return what is in a lock file."""
    by_place = {one.place: one for one in kernels}
    lines = [canonical_json(by_place[place].model_dump(mode="json")) for place in sorted(by_place)]
    return "\n".join([_FIRST_LINE, *lines, ""])


def _parse(line: str, where: str) -> LockedKernel:
    try:
        locked = LockedKernel.model_validate_json(line)
        Problem.parse(locked.problem)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        told = f"{name}: {fault['msg']}" if name else fault["msg"]
        raise InvalidSetting(f"{where}: {told}; correct it.") from None
    except InvalidInput as error:
        raise InvalidSetting(f"{where}: {error}") from None
    return locked
