"""`gemm-tuner contributions`: what holders of tokens sent to a service, and wait with it."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_line, print_table
from gemm_tuner.cli.tokens import actor_here
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.store.contributions import Contributions
from gemm_tuner.store.sql.database import open_database

contributions = typer.Typer(
    help="Accept or drop what holders of tokens contributed", no_args_is_help=False
)

Owner = Annotated[str, typer.Argument(metavar="OWNER", help="Owner, as in the list")]


@contributions.command("list", help="Print who contributed what waits to be accepted")
def list_command(db: options.DatabaseUrl = None, as_json: options.AsJson = False) -> None:
    """Print who contributed how much that waits."""
    found = Contributions(open_database(db, may_create=False)).owners()
    if as_json:
        print_json(
            [
                {
                    "owner": each.owner,
                    "records": each.records,
                    "artifacts": each.artifacts,
                    "size_bytes": each.size_bytes,
                }
                for each in found
            ]
        )
        return
    print_table(
        f"Waiting contributions of {counted(len(found), 'owner')}",
        ("owner", ">records", ">artifacts", ">compressed"),
        [
            (each.owner, f"{each.records}", f"{each.artifacts}", bytes_text(each.size_bytes))
            for each in found
        ],
    )


@contributions.command("accept", help="Import an owner's records: hints for the next sweep")
def accept_command(owner: Owner, db: options.DatabaseUrl = None) -> None:
    """Import an owner's records: hints for the next sweep, which measures anew."""
    store = Contributions(open_database(db, may_create=False))
    added = store.accept(owner, actor=actor_here(), now=datetime.now(UTC))
    print_line(
        f"{counted(added, 'new record')}. None is served: "
        "a sweep of their problems starts from them, builds and measures anew."
    )


@contributions.command("drop", help="Delete what an owner contributed; exit with 1 if nothing")
def drop_command(owner: Owner, db: options.DatabaseUrl = None) -> None:
    """Delete what an owner contributed; exit with 1 if there is nothing."""
    store = Contributions(open_database(db, may_create=False))
    count = store.drop(owner, actor=actor_here(), now=datetime.now(UTC))
    print_line(f"{count} contributions deleted.")
    if not count:
        raise typer.Exit(1)
