"""What was revoked, when and why. Rows are only ever appended; the last of a subject counts."""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from sqlalchemy import Connection, Select, func, insert, select

from gemm_tuner.domain.access import AuditEntry
from gemm_tuner.domain.revocation import (
    MAX_REASON,
    MAX_REVOCATIONS,
    Revocations,
    check_subject,
    is_artifact,
)
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.audit import append_audit
from gemm_tuner.store.sql.statements import Statements, note_change
from gemm_tuner.store.sql.tables import revocations


class RevocationLog(Statements):
    """The revocations of one database."""

    def revoke(self, subject: str, *, reason: str, actor: str, now: datetime) -> bool:
        """Revoke an artifact or a signing key; return whether it was not revoked before.

        Raises:
            InvalidSetting: `subject` names neither.
        """
        check_subject(subject)
        with self._writing() as connection:
            if subject in revoked_among(connection, [subject]):
                return False
            append_revocation(connection, subject, reason=reason, actor=actor, now=now)
        return True

    def lift(self, subject: str, *, reason: str, actor: str, now: datetime) -> bool:
        """Lift a revocation; return whether there was one.

        Raises:
            InvalidSetting: `subject` names nothing that can be revoked.
        """
        check_subject(subject)
        with self._writing() as connection:
            if subject not in revoked_among(connection, [subject]):
                return False
            append_revocation(
                connection, subject, reason=reason, actor=actor, now=now, is_lifted=True
            )
        return True

    def note_rotation(self, old_id: str, new_id: str, *, actor: str, now: datetime) -> None:
        """Note in the audit log that one signing key took the place of another."""
        entry = AuditEntry(
            at=now,
            actor=actor,
            action="signing key rotated",
            subject=new_id,
            detail=f"was {old_id}",
        )
        with self._writing() as connection:
            append_audit(connection, entry)

    def revocations(self) -> Revocations:
        """Return what is revoked now; if it is more than `MAX_REVOCATIONS`, the newest of it."""
        query = (
            select(revocations.c.subject)
            .where(revocations.c.number.in_(_last_numbers()), ~revocations.c.is_lifted)
            .order_by(revocations.c.number.desc())
            .limit(MAX_REVOCATIONS)
        )
        with self._reading() as connection:
            number = connection.scalar(select(func.max(revocations.c.number))) or 0
            check_stored_number(number)
            subjects = connection.scalars(query).all()
            for subject in subjects:
                check_stored_subject(subject)
        return Revocations(
            number=number,
            artifacts=tuple(each for each in subjects if is_artifact(each)),
            key_ids=tuple(each for each in subjects if not is_artifact(each)),
        )


def check_stored_subject(subject: str) -> None:
    """Check that what a row revokes is what can be.

    Raises:
        StoreFailed: it is not.
    """
    try:
        check_subject(subject)
    except InvalidSetting:
        raise StoreFailed(
            f"a revocation names {subject[:80]!r}, which is neither a kernel nor a signing key: "
            "the database was damaged; restore it from a backup, or delete the row."
        ) from None


def check_stored_number(number: int) -> None:
    """Check that a row has a number that a list can have.

    Raises:
        StoreFailed: it has not.
    """
    if number < 0:
        raise StoreFailed(
            f"a revocation has the number {number}, which gemm-tuner did not store: the database "
            "was damaged; restore it from a backup, or delete the row."
        )


def revoked_among(connection: Connection, subjects: Collection[str]) -> Mapping[str, str]:
    """Return those of `subjects` that are revoked, each with the reason."""
    query = select(revocations.c.subject, revocations.c.reason).where(
        revocations.c.number.in_(_last_numbers().where(revocations.c.subject.in_(subjects))),
        ~revocations.c.is_lifted,
    )
    return {row.subject: row.reason for row in connection.execute(query)}


def append_revocation(
    connection: Connection,
    subject: str,
    *,
    reason: str,
    actor: str,
    now: datetime,
    is_lifted: bool = False,
) -> None:
    """Append a revocation, or its end, in the transaction of what gave reason; it is audited."""
    connection.execute(
        insert(revocations).values(
            subject=subject,
            reason=reason[:MAX_REASON],
            created_at=now.astimezone(UTC).isoformat(timespec="seconds"),
            is_lifted=is_lifted,
        )
    )
    # What was answered before is not to be answered again.
    note_change(connection)
    action = "revocation lifted" if is_lifted else "revoked"
    append_audit(
        connection, AuditEntry(at=now, actor=actor, action=action, subject=subject, detail=reason)
    )


def _last_numbers() -> Select[*tuple[int]]:
    """Return the query for the number of the last row of each subject."""
    return select(func.max(revocations.c.number)).group_by(revocations.c.subject)
