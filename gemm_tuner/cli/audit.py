"""`gemm-tuner audit`: who changed what and when."""

from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_table
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.sql.database import open_database

MAX_ENTRIES = 10_000


def audit(
    limit: Annotated[
        int,
        typer.Option("--last", min=1, max=MAX_ENTRIES, help="Print so many of the last changes"),
    ] = 100,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print who changed what and when, the newest last."""
    entries = AuditLog(open_database(db, may_create=False)).newest(limit)
    if as_json:
        print_json(
            [
                {
                    "at": entry.at.isoformat(),
                    "actor": entry.actor,
                    "action": entry.action,
                    "subject": entry.subject,
                    "detail": entry.detail,
                }
                for entry in entries
            ]
        )
        return
    print_table(
        f"The last {len(entries)} changes",
        ("at (UTC)", "by", "what", "of what", "detail"),
        [
            (f"{each.at:%Y-%m-%d %H:%M:%S}", each.actor, each.action, each.subject, each.detail)
            for each in entries
        ],
    )
