"""What holders of tokens contributed: kept apart, and private to each, until it is accepted.

Nothing here is ever a reason to serve a kernel, nor seen by another token. What is accepted
becomes imported records: hints for a sweep, which builds and measures anew.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import sha256

from sqlalchemy import delete, func, select

from gemm_tuner.domain.access import AuditEntry
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import ContributionsFull, DigestMismatch
from gemm_tuner.store.audit import AuditLog, append_audit
from gemm_tuner.store.integrity import check_types, decompress
from gemm_tuner.store.sql.statements import Statements, insert_new
from gemm_tuner.store.sql.tables import contributions
from gemm_tuner.store.trials import IMPORTED_AT_ONCE, Trials
from gemm_tuner.store.wire.record import dump_record, parse_record

MAX_BYTES_OF_OWNER = 2**28  # compressed


class Kind(StrEnum):
    """What was contributed."""

    RECORD = "record"
    ARTIFACT = "artifact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Something that was contributed, without its bytes; `sequence` is the order of insertion."""

    sequence: int
    kind: Kind
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSummary:
    """What one owner contributed, and is not accepted yet; the bytes are compressed ones."""

    owner: str
    records: int
    artifacts: int
    size_bytes: int


class Contributions(Statements):
    """The contributions of one database. An owner is the id of a token, or a user."""

    def add_records(self, trials: Sequence[Trial], *, owner: str, actor: str, now: datetime) -> int:
        """Keep records and return how many were not known of this owner.

        They are committed some at a time, so that others can write in between.

        Raises:
            ContributionsFull: the owner contributed too much that is not accepted yet.
        """
        documents = [dump_record(trial).encode() for trial in trials]
        added = 0
        for begin in range(0, len(documents), IMPORTED_AT_ONCE):
            chunk = documents[begin : begin + IMPORTED_AT_ONCE]
            added += self._keep(chunk, Kind.RECORD, owner=owner, actor=actor, now=now)
        return added

    def add_artifact(
        self, digest: str, binary: bytes, *, owner: str, actor: str, now: datetime
    ) -> bool:
        """Keep a binary and return whether it was not known of this owner.

        Raises:
            DigestMismatch: it has another sha256 than `digest`.
            ContributionsFull: the owner contributed too much that is not accepted yet.
        """
        found = sha256(binary).hexdigest()
        if found != digest:
            raise DigestMismatch(
                f"the artifact has the sha256 {found}, not {digest}; send it to its own address."
            )
        return bool(self._keep([binary], Kind.ARTIFACT, owner=owner, actor=actor, now=now))

    def of(self, owner: str, *, after: int = 0, limit: int = 100) -> tuple[Contribution, ...]:
        """Return what one owner contributed behind `after`, at most `limit`."""
        query = (
            select(
                contributions.c.sequence,
                contributions.c.kind,
                contributions.c.sha256,
                contributions.c.size_bytes,
            )
            .where(contributions.c.owner == owner, contributions.c.sequence > after)
            .order_by(contributions.c.sequence)
            .limit(limit)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
            for row in rows:
                check_types(contributions, row)
            return tuple(
                Contribution(
                    sequence=sequence, kind=Kind(kind), sha256=digest, size_bytes=size_bytes
                )
                for sequence, kind, digest, size_bytes in rows
            )

    def owners(self) -> tuple[OwnerSummary, ...]:
        """Return who contributed how much that is not accepted yet."""
        is_record = contributions.c.kind == Kind.RECORD.value
        query = (
            select(
                contributions.c.owner,
                func.count().filter(is_record),
                func.count().filter(~is_record),
                func.sum(func.length(contributions.c.compressed)),
            )
            .group_by(contributions.c.owner)
            .order_by(contributions.c.owner)
        )
        with self._reading() as connection:
            return tuple(
                OwnerSummary(owner=owner, records=records, artifacts=artifacts, size_bytes=size)
                for owner, records, artifacts, size in connection.execute(query)
            )

    def accept(self, owner: str, *, actor: str, now: datetime) -> int:
        """Import the records of an owner, as hints for sweeps; return how many were not known.

        Artifacts stay: a sweep builds its own.
        """
        imports = Trials(self._engine, self._keys)
        mine = (contributions.c.owner == owner) & (contributions.c.kind == Kind.RECORD.value)
        query = (
            select(contributions.c.sequence, contributions.c.sha256, contributions.c.compressed)
            .where(mine)
            .order_by(contributions.c.sequence)
            .limit(IMPORTED_AT_ONCE)
        )
        added = accepted = 0
        while True:
            with self._reading() as connection:
                rows = connection.execute(query).all()
            if not rows:
                break
            trials = [
                parse_record(decompress("record", digest, compressed))
                for _sequence, digest, compressed in rows
            ]
            # Imported first: what is done twice changes nothing, what is lost would be lost.
            added += imports.add_imported(trials)
            with self._writing() as connection:
                taken = contributions.c.sequence.in_([row[0] for row in rows])
                connection.execute(delete(contributions).where(mine, taken))
            accepted += len(rows)
        if accepted:
            entry = AuditEntry(
                at=now,
                actor=actor,
                action="contributions accepted",
                subject=owner,
                detail=f"{counted(accepted, 'record')}, {added} of them new",
            )
            AuditLog(self._engine).append(entry)
        return added

    def drop(self, owner: str, *, actor: str, now: datetime) -> int:
        """Delete what an owner contributed; return how many there were."""
        with self._writing() as connection:
            count: int = connection.execute(
                delete(contributions).where(contributions.c.owner == owner)
            ).rowcount
            if count:
                entry = AuditEntry(
                    at=now,
                    actor=actor,
                    action="contributions dropped",
                    subject=owner,
                    detail=f"{count}",
                )
                append_audit(connection, entry)
        return count

    def _keep(
        self, contents: Sequence[bytes], kind: Kind, *, owner: str, actor: str, now: datetime
    ) -> int:
        """Keep some contents in one transaction, with what the audit log says of them."""
        held = select(func.sum(func.length(contributions.c.compressed))).where(
            contributions.c.owner == owner
        )
        with self._writing() as connection:
            added = sum(
                insert_new(
                    connection,
                    contributions,
                    owner=owner,
                    kind=kind.value,
                    sha256=sha256(content).hexdigest(),
                    size_bytes=len(content),
                    compressed=zlib.compress(content),
                )
                for content in contents
            )
            # Counted afterwards, and undone: what is known already takes no room.
            held_bytes = connection.scalar(held) or 0
            if added and held_bytes > MAX_BYTES_OF_OWNER:
                raise ContributionsFull(
                    f"{held_bytes} bytes of this token would wait to be accepted, more than "
                    f"{MAX_BYTES_OF_OWNER}; ask whoever runs the service to accept or drop them."
                )
            if added:
                entry = AuditEntry(
                    at=now, actor=actor, action=f"{kind} contributed", subject=f"{added} new"
                )
                append_audit(connection, entry)
        return added
