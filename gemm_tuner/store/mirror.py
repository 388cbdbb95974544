"""Kernels as files below the paths that the service has them at, for a server of plain files."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.files import write_publicly

PATH = Path("v1", "artifacts", "sha256")

_AT_ONCE = 500
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}.*")  # of a run that was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """How many files were written, were there, and were removed; what could not be read, and why.

    What could not be read has no file.
    """

    written: int
    known: int
    removed: int
    left_out: tuple[str, ...]


def mirror(
    repository: Repository, folder: Path, tell: Callable[[int, int], None] = lambda _d, _t: None
) -> MirrorReport:
    """Make the files in `folder` those of the kernels that may be served, and of no others.

    `tell` hears how many kernels are done, of how many.

    Raises:
        StoreFailed: the database does not answer, or a file cannot be written or removed.
    """
    place = folder / PATH
    try:
        place.mkdir(parents=True, exist_ok=True)
        return _mirror(repository, place, tell)
    except OSError as error:
        raise StoreFailed(
            f"the files below {place} cannot be kept ({error.strerror}); make the folder "
            "writable, or room on its disk, and run it again: it goes on from there."
        ) from error


def _mirror(repository: Repository, place: Path, tell: Callable[[int, int], None]) -> MirrorReport:
    digests = repository.artifact_digests()
    entries = list(place.iterdir())
    there = {entry.name for entry in entries if entry.is_file()}
    served = set[str]()
    left_out: list[str] = []
    written = 0
    for start in range(0, len(digests), _AT_ONCE):
        held = repository.held_artifacts(digests[start : start + _AT_ONCE])
        for digest in sorted(held.keys() - there):
            try:
                binary = repository.binary(digest)
            except StoreFailed as error:
                left_out.append(str(error))
                continue
            if binary is not None:  # None was revoked just now
                write_publicly(place / digest, binary)
                written += 1
        served |= held.keys()
        tell(min(start + _AT_ONCE, len(digests)), len(digests))
    gone = {
        entry.name
        for entry in entries
        if entry.name not in served
        and (_DIGEST.fullmatch(entry.name) or _UNFINISHED.fullmatch(entry.name))
        and (entry.is_symlink() or not entry.is_dir())
    }
    for name in gone:
        (place / name).unlink(missing_ok=True)
    return MirrorReport(
        written=written,
        known=len(there & served),
        removed=len(gone),
        left_out=tuple(left_out),
    )
