"""Exchange of records as JSON Lines. Binaries are not part of it: they are rebuilt where needed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.errors import InvalidRecord
from gemm_tuner.resources import tuning_db_dir
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.wire.record import dump_record, parse_record

PAGE = 500
MAX_LINE_BYTES = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedLine:
    """A line that is not a record, counted from 1, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import did: records that were new, records already there, and lines left out."""

    added: int
    known: int
    rejected: tuple[RejectedLine, ...]


def export_records(repository: Repository, stream: TextIO, *, only_finals: bool = False) -> int:
    """Write every trial that was run into the store, one a line, and return how many.

    With `only_finals`, those of the races are left out: verdicts rest on the others.
    """
    count, after = 0, 0
    while True:
        page = repository.page(after=after, limit=PAGE)
        wanted = [
            trial for trial in page.trials if not only_finals or trial.stage is not Stage.RACE
        ]
        stream.writelines(dump_record(trial) + "\n" for trial in wanted)
        count += len(wanted)
        if page.next_after is None:
            return count
        after = page.next_after


def import_records(repository: Repository, lines: Iterable[str | bytes]) -> ImportReport:
    """Add the records in `lines`; a line that is not a record is reported and left out.

    Importing the same lines again changes nothing.
    """
    rejected: list[RejectedLine] = []
    read = 0

    def trials() -> Iterator[Trial]:
        nonlocal read
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                trial = parse_record(line)
            except InvalidRecord as error:
                rejected.append(RejectedLine(number=number, reason=str(error)))
            else:
                read += 1
                yield trial

    added = repository.add_imported(trials())
    return ImportReport(added=added, known=read - added, rejected=tuple(rejected))


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one of more than `MAX_LINE_BYTES` is cut, and so no record."""
    while line := stream.readline(MAX_LINE_BYTES):
        yield line
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)


def import_shipped(repository: Repository) -> ImportReport:
    """Add the records that ship with the package."""
    trials = tuple(shipped_records())
    added = repository.add_imported(trials)
    return ImportReport(added=added, known=len(trials) - added, rejected=())


def shipped_records() -> Iterator[Trial]:
    """Yield the records that ship with the package, one file for each CPU.

    Raises:
        InvalidRecord: a line of a shipped file is not a record.
    """
    for path in sorted(tuning_db_dir().glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield parse_record(line)


def shipped_lines(model_key: str, problem: Problem) -> Iterator[tuple[str, str]]:
    """Yield the lines with records of a problem that ship for a CPU model, each with its place.

    Other lines are not even parsed: there are thousands.
    """
    named = f'"problem":{canonical_json(problem.text)}'
    for path in sorted(tuning_db_dir().glob("*.jsonl")):
        if not path.name.startswith(f"{model_key}-"):
            continue
        with path.open(errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if named in line:
                    yield f"line {number} of {path.name}", line
