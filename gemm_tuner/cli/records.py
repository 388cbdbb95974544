"""`gemm-tuner records`: move what was measured between machines, as JSON Lines."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_json, print_line, print_message
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.database import open_database
from gemm_tuner.store.exchange import export_records, import_records, import_shipped, read_lines
from gemm_tuner.store.repository import Repository

records = typer.Typer(help="Export and import records", no_args_is_help=False)


@records.command("export", help="Write every record measured here, one JSON text a line")
def export_command(
    file: Annotated[Path | None, typer.Argument(help="By default standard output")] = None,
    only_finals: Annotated[
        bool, typer.Option("--finals", help="Leave out the races: verdicts rest on the others")
    ] = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Write every record measured here, one JSON text a line."""
    repository = Repository(open_database(db, may_create=False))
    if file is None:
        export_records(repository, sys.stdout, only_finals=only_finals)
        return
    try:
        with file.open("w", encoding="utf-8") as stream:
            count = export_records(repository, stream, only_finals=only_finals)
    except OSError as error:
        raise InvalidSetting(
            f"file {file} cannot be written: {error.strerror}; name another."
        ) from None
    print_message(f"{count} records written to {file}.")


@records.command("import", help="Add records from a file; those already known change nothing")
def import_command(
    file: Annotated[Path | None, typer.Argument(help="A file of records, one a line")] = None,
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
    repository = Repository(open_database(db))
    if file is None:
        report = import_shipped(repository)
    else:
        try:
            with file.open("rb") as stream:
                report = import_records(repository, read_lines(stream))
        except OSError as error:
            raise InvalidSetting(f"file {file} cannot be read: {error}; name another.") from None

    for line in report.rejected:
        print_message(f"line {line.number} was left out: {line.reason}")
    if as_json:
        rejected = [{"line": line.number, "reason": line.reason} for line in report.rejected]
        print_json({"added": report.added, "known": report.known, "rejected": rejected})
    else:
        print_line(
            f"{report.added} records added, {report.known} already known, "
            f"{len(report.rejected)} lines left out"
        )
    if report.rejected:
        raise typer.Exit(1)
