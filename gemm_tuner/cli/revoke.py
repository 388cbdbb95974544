"""`gemm-tuner revoke`: withdraw a kernel or a signing key from everyone who has it."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_line
from gemm_tuner.cli.tokens import actor_here
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def revoke(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SHA256|KEY_ID", help="The sha256 of a kernel, or the id of a signing key"
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever asks for it")],
    *,
    is_lifted: Annotated[bool, typer.Option("--lift", help="Take the revocation back")] = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Withdraw a kernel or a signing key from everyone; exit 1 if nothing changed."""
    repository = Repository(open_database(db, may_create=False))
    change = repository.lift if is_lifted else repository.revoke
    if not change(subject, reason=reason, actor=actor_here(), now=datetime.now(UTC)):
        print_line("It was not revoked." if is_lifted else "It was revoked already.")
        raise typer.Exit(1)
    print_line(
        f"{subject} is {'no longer' if is_lifted else 'now'} revoked; clients learn it at their "
        "next ask, within minutes."
    )
