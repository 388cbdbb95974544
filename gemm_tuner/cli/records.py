"""`gemm-tuner records`: move what was measured between machines, as JSON Lines."""

import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from sqlalchemy import Engine

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message
from gemm_tuner.cli.tokens import actor_here
from gemm_tuner.domain.access import AuditEntry
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import open_plain
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.exchange import (
    ImportReport,
    export_records,
    import_records,
    import_shipped,
    read_lines,
)
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.user_file import user_file

_STANDARD = Path("-")  # output or input, as many programs write it

records = typer.Typer(help="Export, import and attest records", no_args_is_help=False)


@records.command("export", help="Write every record measured here, as JSON Lines")
def export_command(
    file: Annotated[
        Path | None, typer.Argument(help="By default, or as -, standard output")
    ] = None,
    only_finals: Annotated[
        bool, typer.Option("--finals", help="Leave out races, on which no verdict rests")
    ] = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Write every record measured here, one JSON text a line."""
    if file == _STANDARD:
        file = None
    check_place(file, databases=[db])
    repository = Repository(open_database(db, may_create=False))
    if file is None:
        export_records(repository, sys.stdout, only_finals=only_finals)
        return
    with user_file(file) as whole:
        stream = TextIOWrapper(whole, encoding="utf-8")
        count = export_records(repository, stream, only_finals=only_finals)
        stream.detach()  # which writes what is left
    print_message(f"{counted(count, 'record')} written to {file}.")


@records.command("import", help="Add records from a file; those already known change nothing")
def import_command(
    file: Annotated[
        Path | None, typer.Argument(help="A file of records, one a line; - is standard input")
    ] = None,
    is_shipped: Annotated[
        bool,
        typer.Option(
            "--shipped",
            help="Import the records that come with gemm-tuner: what was "
            "measured for docs/performance.md. A sweep starts from what won there",
        ),
    ] = False,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Add records from a file; those already known change nothing."""
    if is_shipped == (file is not None):
        raise InvalidSetting("which records is not clear; give either a FILE or --shipped.")
    engine = open_database(db)
    repository = Repository(engine)
    what = "those of the package" if file is None else str(file)
    try:
        with aborting(signal.SIGTERM):
            report = _imported(repository, file)
    except typer.Abort:
        _note(engine, "records imported", what, "aborted; what was added before is kept")
        raise

    if report.added:
        _note(engine, "records imported", what, f"{report.added} new, {report.known} known")
    for line in report.rejected:
        print_message(f"line {line.number} was left out: {line.reason}")
    if as_json:
        rejected = [{"line": line.number, "reason": line.reason} for line in report.rejected]
        print_json({"added": report.added, "known": report.known, "rejected": rejected})
    else:
        print_line(
            f"{counted(report.added, 'record')} added, {report.known} already known, "
            f"{counted(len(report.rejected), 'line')} left out"
        )
    if report.rejected:
        raise typer.Exit(1)


def _imported(repository: Repository, file: Path | None) -> ImportReport:
    if file is None:
        return import_shipped(repository)
    try:
        with _opened(file) as stream:
            return import_records(repository, read_lines(stream))
    except OSError as error:
        raise InvalidSetting(f"file {file} cannot be read: {error}; name another.") from None


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if file != _STANDARD:
        return open_plain(file)
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return nullcontext(sys.stdin.buffer)


@records.command(
    "attest", help="Attest what was measured into a database, so that it is served to you"
)
def attest_command(
    is_agreed: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Attest with your measuring key what was run into a database and no one attests."""
    engine = open_database(db, may_create=False)
    repository = Repository(engine)
    if not is_agreed:
        typer.confirm(
            "Kernels of this database will be served and loaded by your word. Whoever could write "
            "to it may have put them there. Attest them?",
            abort=True,
            err=True,
        )
    trials, artifacts = repository.attest_trials(), repository.attest_artifacts()
    if trials or artifacts:
        what = f"{counted(trials, 'trial')}, {counted(artifacts, 'kernel')}"
        _note(engine, "records attested", what, "by the measuring key of this user")
    if as_json:
        print_json({"trials": trials, "artifacts": artifacts})
    else:
        print_line(
            f"{counted(trials, 'trial')} and {counted(artifacts, 'kernel')} attested with your "
            "measuring key"
        )


def _note(engine: Engine, action: str, subject: str, detail: str) -> None:
    """Add to the audit log what was done to the records."""
    AuditLog(engine).append(
        AuditEntry(
            at=datetime.now(UTC),
            actor=actor_here(),
            action=action,
            subject=subject,
            detail=detail,
        )
    )
