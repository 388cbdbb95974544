"""Copying a database into another, of the same kind or not: to move, to merge, or as a backup."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, Table, func, insert, select, tuple_, update

from gemm_tuner.errors import InvalidRecord, StoreFailed
from gemm_tuner.store.maintenance.rows import (
    check_row,
    key_of,
    number_of,
    references,
    shown_key,
    stored_tables,
)
from gemm_tuner.store.sql.database import writing
from gemm_tuner.store.sql.scan import count_rows, read_chunks, snapshot
from gemm_tuner.store.sql.statements import translated_errors
from gemm_tuner.store.sql.tables import METADATA, revocations, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """How far a copy is: rows of all tables that were looked at, and how many there are."""

    table: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did: rows that were new, rows that were there, and damaged ones left out."""

    added: int
    known: int
    left_out: tuple[str, ...]


class DatabaseCopy:
    """A copy from a snapshot of `source` into `target`.

    Rows are committed some at a time, so that others can write in between. What is there already
    stays, so a copy that was stopped goes on where it was, and a second one changes nothing. A row
    that does not match its digest is left out, and so is what refers to it. What the target alone
    has revoked stays revoked, and a token that either has revoked is revoked in the target. A trial
    keeps its number where the target has no greater one, and comes behind all others elsewhere:
    numbers, and so the serials of verdicts, never go back.
    """

    def __init__(self, source: Engine, target: Engine, tell: Callable[[CopyStep], None]) -> None:
        self._source = source
        self._target = target
        self._tell = tell
        self._added = self._known = 0
        self._left_out: dict[str, set[object]] = {}
        self._reasons: list[str] = []

    def run(self) -> CopyReport:
        """Copy all tables.

        Raises:
            StoreFailed: a database does not answer, or cannot be written.
        """
        tables = stored_tables()
        with snapshot(self._source) as source:
            total = sum(count_rows(source, table) for table in tables)
            for table in tables:
                self._tell(CopyStep(table=table.name, done=self._done, total=total))
                for chunk in read_chunks(source, table, key_of(table)):
                    self._copy_chunk(source, table, chunk)
                    self._tell(CopyStep(table=table.name, done=self._done, total=total))
        return CopyReport(added=self._added, known=self._known, left_out=tuple(self._reasons))

    @property
    def _done(self) -> int:
        return self._added + self._known + len(self._reasons)

    def _copy_chunk(self, source: Connection, table: Table, keys: Sequence[RowMapping]) -> None:
        with translated_errors(self._target), writing(self._target).begin() as target:
            missing = _missing(target, table, keys)
            rows = _read_rows(source, table, missing) if missing else []
            whole = [dict(row) for row in rows if self._is_whole(table, row)]
            if table is revocations:
                whole = [row for row in whole if self._may_follow(source, target, row)]
            if whole:
                _number(target, table, whole)
                target.execute(insert(table), whole)
                _follow(target, table)
            if table is tokens:
                _revoke_tokens(source, target, keys)
        self._added += len(whole)
        self._known += len(keys) - len(missing)

    def _is_whole(self, table: Table, row: RowMapping) -> bool:
        for column, other, _name in references(table):
            if row[column] in self._left_out.get(other.name, ()):
                return self._leave_out(table, row, f"it belongs to {other.name} left out")
        try:
            check_row(table, row)
        except (StoreFailed, InvalidRecord) as error:
            return self._leave_out(table, row, str(error))
        return True

    def _may_follow(self, source: Connection, target: Connection, row: dict[str, Any]) -> bool:
        """Return whether a row leaves in force what the target alone has revoked."""
        columns = key_of(revocations)
        last = (
            select(*columns)
            .where(revocations.c.subject == row["subject"])
            .order_by(revocations.c.number.desc())
        )
        there = target.execute(last).first()
        if not row["is_lifted"] or there is None or there.is_lifted:
            return True
        same = select(*columns).where(tuple_(*columns).in_([tuple(there)]))
        if source.execute(same).first() is not None:
            return True
        self._reasons.append(
            f"revocations {row['subject'][:16]}: it is lifted in the source, and revoked in the "
            'target for a reason of its own; "gemm-tuner revoke --lift" lifts it there.'
        )
        return False

    def _leave_out(self, table: Table, row: RowMapping, reason: str) -> bool:
        self._reasons.append(f"{table.name} {shown_key(table, row)}: {reason}")
        self._left_out.setdefault(table.name, set()).add(row[key_of(table)[0].name])
        return False


def _missing(target: Connection, table: Table, rows: Sequence[RowMapping]) -> list[tuple[Any, ...]]:
    """Return the keys of those rows that the target does not have."""
    columns = key_of(table)
    keys = [tuple(row[column.name] for column in columns) for row in rows]
    there = target.execute(select(*columns).where(tuple_(*columns).in_(keys)))
    known = {tuple(row) for row in there}
    return [key for key in keys if key not in known]


def _read_rows(
    source: Connection, table: Table, keys: Sequence[tuple[Any, ...]]
) -> Sequence[RowMapping]:
    columns = key_of(table)
    query = select(table).where(tuple_(*columns).in_(keys)).order_by(*table.primary_key.columns)
    return source.execute(query).mappings().all()


def _number(target: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Give each row its old number, or the next one where that would not be the greatest."""
    column = number_of(table)
    if column is None:
        return
    newest = target.execute(select(func.max(column))).scalar() or 0
    for row in rows:
        newest = max(newest + 1, row[column.name])
        row[column.name] = newest


def _revoke_tokens(source: Connection, target: Connection, rows: Sequence[RowMapping]) -> None:
    """Revoke in the target what the source has revoked since the token was copied."""
    there = tokens.c.id.in_([row[tokens.c.id.name] for row in rows])
    revoked = select(tokens.c.id, tokens.c.revoked_at).where(
        there, tokens.c.revoked_at.is_not(None)
    )
    for token_id, revoked_at in source.execute(revoked).all():
        target.execute(
            update(tokens)
            .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            .values(revoked_at=revoked_at)
        )


def _follow(target: Connection, table: Table) -> None:
    """Let what depends on new rows follow them: the next number, and what is derived."""
    column = number_of(table)
    if column is not None and target.dialect.name == "postgresql":
        newest = select(func.max(column)).scalar_subquery()
        target.execute(select(func.setval(f"{table.name}_{column.name}_seq", newest)))
    state = METADATA.tables.get("verdict_state")
    if state is not None:
        target.execute(update(state).values(rules=0, changes=state.c.changes + 1))
