"""`gemm-tuner tokens`: who may ask a service for what, beyond this machine."""

import getpass
import os
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.domain.access import Scope, Token
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens

tokens = typer.Typer(
    help="Make, list and revoke tokens: who may ask a service for what", no_args_is_help=False
)


def actor_here() -> str:
    """Return who runs this command, for the audit log."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "without a name"
    return f"command line, uid {os.getuid()} ({name})"


@tokens.command("create", help="Make a token and print it, this once")
def create_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what will hold it")],
    scopes: Annotated[
        list[str],
        typer.Option(
            "--scope",
            help=f"What it permits: {Scope.names_to_give()}; may be given several times",
        ),
    ],
    days: Annotated[
        float | None, typer.Option("--days", help="Days until it expires; by default it does not")
    ] = None,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a token and print it, this once."""
    store = Tokens(open_database(db))
    token, secret = store.create(
        name,
        [Scope.parse_new(each) for each in scopes],
        lifetime=None if days is None else _lifetime(days),
        actor=actor_here(),
        now=datetime.now(UTC),
    )
    if as_json:
        print_json({**_facts(token), "token": secret.text})
        return
    print_message(f"Token {token.id} of {token.name}; keep it, it is not shown again:")
    print_line(secret.text)


@tokens.command("list", help="Print the tokens, but not their secrets")
def list_command(db: options.DatabaseUrl = None, as_json: options.AsJson = False) -> None:
    """Print the tokens, but not their secrets."""
    found = Tokens(open_database(db, may_create=False)).all()
    if as_json:
        print_json([_facts(token) for token in found])
        return
    now = datetime.now(UTC)
    print_table(
        counted(len(found), "token"),
        ("id", "name", "scopes", "created", "expires", "state"),
        [
            (
                token.id,
                token.name,
                " ".join(sorted(token.scopes)),
                f"{token.created_at:%Y-%m-%d %H:%M}",
                "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M}",
                _state(token, now),
            )
            for token in found
        ],
    )


@tokens.command("revoke", help="Revoke a token for ever; exit with 1 if there is none")
def revoke_command(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, as in the list")],
    db: options.DatabaseUrl = None,
) -> None:
    """Revoke a token for ever; exit with 1 if there is none."""
    store = Tokens(open_database(db, may_create=False))
    if not store.revoke(token_id, actor=actor_here(), now=datetime.now(UTC)):
        print_line("No token of this id can be revoked.")
        raise typer.Exit(1)
    print_line(f"Token {token_id} is revoked; running services know it within seconds.")


def _lifetime(days: float) -> timedelta:
    try:
        lifetime = timedelta(days=days)
    except (OverflowError, ValueError):
        lifetime = timedelta(0)
    if lifetime <= timedelta(0):
        raise InvalidSetting(f"--days {days:g} is not a time; write a number of days, as 90.")
    return lifetime


def _state(token: Token, now: datetime) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "valid" if token.is_valid(now) else "expired"


def _facts(token: Token) -> dict[str, object]:
    return {
        "id": token.id,
        "name": token.name,
        "scopes": sorted(token.scopes),
        "created_at": token.created_at.isoformat(),
        "expires_at": token.expires_at and token.expires_at.isoformat(),
        "revoked_at": token.revoked_at and token.revoked_at.isoformat(),
    }
