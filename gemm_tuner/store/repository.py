"""Reading and writing the store: the only module that knows SQL statements."""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TypeVarTuple

from sqlalchemy import Connection, Engine, Row, Select, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import canonical_json, identity
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.errors import InvalidRecord, StoreFailed
from gemm_tuner.store.database import writing
from gemm_tuner.store.tables import (
    ArtifactRow,
    Base,
    CpuRow,
    Origin,
    ProblemRow,
    SourceRow,
    SweepEndRow,
    TrialRow,
)
from gemm_tuner.store.wire import WireArtifact, WireCpu, dump_record, parse_record

_INSERTS: dict[str, Callable[[type[Base]], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}

IMPORTED_AT_ONCE = 100
MAX_CONTENT_BYTES = 2**26  # of a binary or a source; the largest generated ones have some 2**20

Columns = TypeVarTuple("Columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some trials in the order of insertion, and where the next page begins, if there is one."""

    trials: tuple[Trial, ...]
    next_after: int | None


class Repository:
    """The trials, artifacts and completed sweeps of one database.

    Every method raises `StoreFailed` when the database does not answer or holds a row that does
    not match its key.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = writing(engine)

    def add_trial(self, trial: Trial) -> None:
        """Append `trial`; when this returns, it is on the disk. A trial already there stays."""
        with self._writing() as connection:
            _append(connection, trial, Origin.MEASURED)

    def add_imported(self, trials: Iterable[Trial]) -> int:
        """Append trials from elsewhere and return how many were not known.

        They are committed some at a time, so that others can write in between; what was committed
        before a failure stays, and is known when the same trials come again.
        """
        added = 0
        waiting = iter(trials)
        while chunk := tuple(islice(waiting, IMPORTED_AT_ONCE)):
            with self._writing() as connection:
                added += sum(_append(connection, trial, Origin.IMPORTED) for trial in chunk)
        return added

    def add_build(self, artifact: Artifact, *, binary: bytes, source_text: str) -> None:
        """Keep a binary and its source. Those already there stay.

        Raises:
            StoreFailed: the bytes are not those that `artifact` names.
        """
        self._keep_build(_insert_new, artifact, binary, source_text)

    def replace_build(self, artifact: Artifact, *, binary: bytes, source_text: str) -> None:
        """Replace a damaged binary and its source.

        Raises:
            StoreFailed: the bytes are not those that `artifact` names.
        """
        self._keep_build(_replace, artifact, binary, source_text)

    def holds(self, artifact: Artifact) -> bool:
        """Return whether a binary and its source are in the store, undamaged."""
        try:
            contents = (self.binary(artifact.sha256), self.source_text(artifact.sha256))
        except StoreFailed:
            return False
        return None not in contents

    def _keep_build(
        self, put: Callable[..., bool], artifact: Artifact, binary: bytes, source_text: str
    ) -> None:
        _check_digest("artifact", artifact.sha256, binary)
        _check_digest("source", artifact.source_sha256, source_text.encode())
        with self._writing() as connection:
            put(
                connection,
                SourceRow,
                sha256=artifact.source_sha256,
                compressed_text=zlib.compress(source_text.encode()),
            )
            put(
                connection,
                ArtifactRow,
                sha256=artifact.sha256,
                document=canonical_json(WireArtifact.of(artifact).model_dump(mode="json")),
                source_sha256=artifact.source_sha256,
                compressed_binary=zlib.compress(binary),
            )

    def trials(
        self,
        *,
        problem: Problem | None = None,
        cpu_key: str | None = None,
        class_key: str | None = None,
        model_key: str | None = None,
        generator: str | None = None,
        only_decisive: bool = False,
        origin: Origin | None = Origin.MEASURED,
    ) -> tuple[Trial, ...]:
        """Return the trials that match every given value, in the order of insertion.

        Only trials that were run into this store are returned unless `origin` says otherwise;
        None stands for any. With `only_decisive`, those are left out that no verdict depends on:
        what neither confirmed a kernel nor failed.
        """
        query = select(TrialRow.id, TrialRow.document).order_by(TrialRow.sequence)
        if problem is not None:
            query = query.where(TrialRow.problem_id == _problem_id(problem))
        if any(key is not None for key in (cpu_key, class_key, model_key)):
            query = query.join(CpuRow, CpuRow.id == TrialRow.cpu_id)
        if cpu_key is not None:
            query = query.where(CpuRow.exact_key == cpu_key)
        if class_key is not None:
            query = query.where(CpuRow.class_key == class_key)
        if model_key is not None:
            query = query.where(CpuRow.class_key.startswith(f"{model_key}-", autoescape=True))
        if generator is not None:
            query = query.where(TrialRow.generator == generator)
        if only_decisive:
            query = query.where(
                (TrialRow.stage == Stage.CONFIRM.value)
                | (TrialRow.outcome != Outcome.CORRECT.value)
            )
        if origin is not None:
            query = query.where(TrialRow.origin == origin.value)
        with self._reading() as connection:
            return tuple(_read_trial(key, text) for key, text in connection.execute(query))

    def page(self, *, after: int = 0, limit: int = 100) -> Page:
        """Return at most `limit` trials that were run into this store, those behind `after`."""
        query = (
            select(TrialRow.sequence, TrialRow.id, TrialRow.document)
            .where(TrialRow.sequence > after, TrialRow.origin == Origin.MEASURED.value)
            .order_by(TrialRow.sequence)
            .limit(limit + 1)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return Page(
            trials=tuple(_read_trial(key, document) for _, key, document in rows[:limit]),
            next_after=rows[limit - 1][0] if len(rows) > limit else None,
        )

    def ranges_of(self, problem: Problem) -> tuple[Problem, ...]:
        """Return the known problems for a range of m that differ from `problem` in m alone."""
        query = select(ProblemRow.id, ProblemRow.document).where(
            ProblemRow.n == problem.n,
            ProblemRow.k == problem.k,
            ProblemRow.types == problem.types.text,
            ProblemRow.w_layout == problem.layout_text,
            ProblemRow.epilogue == problem.epilogue.text,
        )
        with self._reading() as connection:
            known = tuple(_read_problem(key, text) for key, text in connection.execute(query))
        return tuple(each for each in known if each.m.exact is None and each != problem)

    def newest_trial(self, problem: Problem) -> int:
        """Return the number of the newest trial of a layer, whatever its m, 0 if there is none.

        It grows with each trial that is added, and never else.
        """
        query = (
            select(func.max(TrialRow.sequence))
            .join(ProblemRow, ProblemRow.id == TrialRow.problem_id)
            .where(
                ProblemRow.n == problem.n,
                ProblemRow.k == problem.k,
                ProblemRow.types == problem.types.text,
                ProblemRow.w_layout == problem.layout_text,
                ProblemRow.epilogue == problem.epilogue.text,
            )
        )
        row = self._first(query)
        return 0 if row is None else row[0] or 0

    def cpu(self, exact_key: str) -> Cpu | None:
        """Return a CPU known by this key."""
        query = select(CpuRow.id, CpuRow.document).where(CpuRow.exact_key == exact_key).limit(1)
        row = self._first(query)
        if row is None:
            return None
        _check_digest("CPU", row[0], row[1].encode())
        return WireCpu.model_validate_json(row[1]).to_domain()

    def held_artifacts(self, digests: Collection[str]) -> frozenset[str]:
        """Return those of `digests` whose binaries are in the store."""
        if not digests:
            return frozenset()
        query = select(ArtifactRow.sha256).where(ArtifactRow.sha256.in_(digests))
        with self._reading() as connection:
            return frozenset(connection.scalars(query))

    def binary(self, sha256: str) -> bytes | None:
        """Return the binary with this digest."""
        row = self._first(select(ArtifactRow.compressed_binary).where(ArtifactRow.sha256 == sha256))
        return None if row is None else _decompress("artifact", sha256, row[0])

    def source_text(self, sha256: str) -> str | None:
        """Return the source of the binary with this digest."""
        row = self._first(
            select(SourceRow.sha256, SourceRow.compressed_text)
            .join(ArtifactRow, ArtifactRow.source_sha256 == SourceRow.sha256)
            .where(ArtifactRow.sha256 == sha256)
        )
        return None if row is None else _decompress("source", row[0], row[1]).decode()

    def mark_ended(
        self,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        *,
        toolchain: str,
        generator: str,
        end: SweepEnd,
    ) -> None:
        """Note how a sweep ended; an earlier end of it beside the same baseline is replaced."""
        with self._writing() as connection:
            _insert_problem(connection, problem)
            key = {
                **_sweep_key(problem, cpu_key, context, toolchain, generator),
                "baseline": end.baseline,
            }
            connection.execute(delete(SweepEndRow).filter_by(**key))
            _insert_new(
                connection,
                SweepEndRow,
                **key,
                is_exhausted=end.is_exhausted,
                budget_s=end.budget_s,
            )

    def sweep_ends(
        self,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        *,
        toolchain: str,
        generator: str,
    ) -> tuple[SweepEnd, ...]:
        """Return how such sweeps ended, one for each baseline, that of most time first."""
        query = (
            select(SweepEndRow.baseline, SweepEndRow.is_exhausted, SweepEndRow.budget_s)
            .filter_by(**_sweep_key(problem, cpu_key, context, toolchain, generator))
            .order_by(SweepEndRow.budget_s.desc())
        )
        with self._reading() as connection:
            return tuple(
                SweepEnd(baseline=baseline, is_exhausted=is_exhausted, budget_s=budget_s)
                for baseline, is_exhausted, budget_s in connection.execute(query)
            )

    def _first(self, query: Select[*Columns]) -> Row[*Columns] | None:
        with self._reading() as connection:
            return connection.execute(query).first()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _translated_errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with _translated_errors(), self._writer.begin() as connection:
            yield connection


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        reason = getattr(error, "orig", None) or error
        raise StoreFailed(
            f"the database did not do what was asked: {reason}; "
            "check its disk, permissions and other processes, then try again."
        ) from error


def _append(connection: Connection, trial: Trial, origin: Origin) -> bool:
    _insert_problem(connection, trial.problem)
    cpu_document = canonical_json(WireCpu.of(trial.cpu).model_dump(mode="json"))
    cpu_id = _digest(cpu_document)
    _insert_new(
        connection,
        CpuRow,
        id=cpu_id,
        document=cpu_document,
        exact_key=trial.cpu.exact_key,
        class_key=trial.cpu.class_key,
    )
    document = dump_record(trial)
    return _insert_new(
        connection,
        TrialRow,
        id=_digest(document),
        document=document,
        origin=origin.value,
        problem_id=_problem_id(trial.problem),
        cpu_id=cpu_id,
        threads=trial.context.threads,
        regime=trial.context.regime.value,
        generator=trial.generator,
        stage=trial.stage.value,
        outcome=trial.outcome.value,
    )


def _insert_problem(connection: Connection, problem: Problem) -> None:
    _insert_new(
        connection,
        ProblemRow,
        id=_problem_id(problem),
        document=canonical_json(problem.text),
        n=problem.n,
        k=problem.k,
        types=problem.types.text,
        w_layout=problem.layout_text,
        epilogue=problem.epilogue.text,
    )


def _insert_new(connection: Connection, table: type[Base], **values: str | float | bytes) -> bool:
    """Insert a row unless its key is there, and return whether it was inserted."""
    insert = _INSERTS[connection.dialect.name](table)
    return connection.execute(insert.values(values).on_conflict_do_nothing()).rowcount == 1


def _replace(connection: Connection, table: type[Base], **values: str | bytes) -> bool:
    """Insert a row in the place of one with its sha256, if there is one."""
    insert = _INSERTS[connection.dialect.name](table).values(values)
    connection.execute(insert.on_conflict_do_update(index_elements=["sha256"], set_=values))
    return True


def _sweep_key(
    problem: Problem, cpu_key: str, context: ExecutionContext, toolchain: str, generator: str
) -> dict[str, str | int]:
    return {
        "problem_id": _problem_id(problem),
        "cpu_key": cpu_key,
        "threads": context.threads,
        "regime": context.regime.value,
        "toolchain": toolchain,
        "generator": generator,
    }


def _problem_id(problem: Problem) -> str:
    return identity(problem.text)


def _digest(document: str) -> str:
    return sha256(document.encode()).hexdigest()


def _read_trial(key: str, document: str) -> Trial:
    _check_digest("trial", key, document.encode())
    try:
        return parse_record(document)
    except InvalidRecord as error:
        raise StoreFailed(
            f"trial {key[:12]} in the database cannot be read: {error}; update gemm-tuner."
        ) from error


def _read_problem(key: str, document: str) -> Problem:
    _check_digest("problem", key, document.encode())
    return Problem.parse(document.strip('"'))


def _decompress(kind: str, key: str, compressed: bytes) -> bytes:
    try:
        # One byte more than may be shows that there is more, and costs no memory for it.
        content = zlib.decompressobj().decompress(compressed, MAX_CONTENT_BYTES + 1)
    except zlib.error:
        content = b""
    if len(content) > MAX_CONTENT_BYTES:
        raise StoreFailed(
            f"the {kind} {key[:12]} has more than {MAX_CONTENT_BYTES} bytes: it was not stored by "
            "gemm-tuner; restore the database from a backup, or start a new one with --db."
        )
    _check_digest(kind, key, content)
    return content


def _check_digest(kind: str, key: str, content: bytes) -> None:
    digest = sha256(content).hexdigest()
    if digest != key:
        raise StoreFailed(
            f"the {kind} {key[:12]} has bytes with the sha256 {digest[:12]}: it was damaged; "
            "restore the database from a backup, or start a new one with --db."
        )
