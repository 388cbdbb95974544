"""The audit log: who changed what and when. Entries are only ever appended."""

from datetime import UTC, datetime

from sqlalchemy import Connection, insert, select

from gemm_tuner.domain.access import AuditEntry
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import audit

_MAX_CHARACTERS = 400


class AuditLog(Statements):
    """The audit log of one database."""

    def append(self, entry: AuditEntry) -> None:
        """Append an entry."""
        with self._writing() as connection:
            append_audit(connection, entry)

    def newest(self, limit: int) -> tuple[AuditEntry, ...]:
        """Return the last entries, at most `limit`, the oldest of them first."""
        query = (
            select(audit.c.at, audit.c.actor, audit.c.action, audit.c.subject, audit.c.detail)
            .order_by(audit.c.sequence.desc())
            .limit(limit)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
            return tuple(
                AuditEntry(
                    at=datetime.fromisoformat(at),
                    actor=actor,
                    action=action,
                    subject=subject,
                    detail=detail,
                )
                for at, actor, action, subject, detail in reversed(rows)
            )


def append_audit(connection: Connection, entry: AuditEntry) -> None:
    """Append an entry in the transaction of what it tells; long texts are cut."""
    connection.execute(
        insert(audit).values(
            at=entry.at.astimezone(UTC).isoformat(timespec="seconds"),
            actor=entry.actor[:_MAX_CHARACTERS],
            action=entry.action[:_MAX_CHARACTERS],
            subject=entry.subject[:_MAX_CHARACTERS],
            detail=entry.detail[:_MAX_CHARACTERS],
        )
    )
