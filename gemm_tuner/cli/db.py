"""`gemm-tuner db`: look after a database as a whole."""

import time
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_public_folder
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.cli.tokens import actor_here
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.select.same_model import nameable_with_fewer_features
from gemm_tuner.store.maintenance.checking import check_database
from gemm_tuner.store.maintenance.copying import CopyStep, DatabaseCopy
from gemm_tuner.store.maintenance.pruning import Pruning
from gemm_tuner.store.mirror import mirror
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

db = typer.Typer(help="Copy, check, derive, prune and mirror a database", no_args_is_help=False)


@db.command("copy", help="Copy a database into another; what is there already stays")
def copy_command(
    source: Annotated[
        str, typer.Argument(metavar="FROM", callback=options.kept_url, help="URL of a database")
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO", callback=options.kept_url, help="URL of another, made if missing"
        ),
    ],
    as_json: options.AsJson = False,
) -> None:
    """Copy a database into another; what is there already stays."""
    with_source = open_database(source, may_create=False)
    with_target = open_database(target)
    with ProgressLine("copy", later_s=0) as line:
        show = pace(line)

        def tell(step: CopyStep) -> None:
            show(step.table, step.done, step.total)

        report = DatabaseCopy(with_source, with_target, tell).run()
    with_source.dispose()
    with_target.dispose()
    open_database(target).dispose()  # what follows from the new rows is derived at once

    for reason in report.left_out:
        print_message(f"left out: {reason}")
    if as_json:
        print_json(
            {"added": report.added, "known": report.known, "left_out": list(report.left_out)}
        )
    else:
        print_line(
            f"{counted(report.added, 'row')} copied, {report.known} already there, "
            f"{len(report.left_out)} left out"
        )
    if report.left_out:
        raise typer.Exit(1)


@db.command("check", help="Check each row against its digest; exit with 1 if one is damaged")
def check_command(url: options.DatabaseUrl = None, as_json: options.AsJson = False) -> None:
    """Check each row against its digest; exit with 1 if one is damaged."""
    engine = open_database(url, may_create=False)
    with ProgressLine("check", later_s=0) as line:
        report = check_database(engine, pace(line))
    engine.dispose()
    for damage in report.damages:
        print_message(f"damaged: {damage}")
    if as_json:
        print_json({"rows": report.rows, "damages": list(report.damages)})
    else:
        print_line(
            f"{counted(report.rows, 'row')} checked, {counted(len(report.damages), 'damage')}"
        )
    if report.damages:
        raise typer.Exit(1)


@db.command("derive", help="Derive all verdicts again from the trials that are believed")
def derive_command(url: options.DatabaseUrl = None, as_json: options.AsJson = False) -> None:
    """Derive all verdicts again from the trials that are believed."""
    engine = open_database(url, may_create=False)
    with ProgressLine("derive", later_s=0) as line:
        show = pace(line)
        count = Repository(engine).derive_again(lambda done, total: show("problems", done, total))
    engine.dispose()
    if as_json:
        print_json({"verdicts": count})
    else:
        print_line(f"{counted(count, 'verdict')} derived")


@db.command(
    "prune", help="Say which old trials and kernels no answer needs, and remove them on request"
)
def prune_command(
    days: Annotated[
        float, typer.Option("--days", min=0, max=36500, help="Remove only what is older")
    ] = 180,
    is_meant: Annotated[
        bool, typer.Option("--delete", help="Remove them; without it nothing is changed")
    ] = False,
    url: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Say which old trials and kernels no answer needs, and remove them on request."""
    engine = open_database(url, may_create=False)
    repository, pruning = Repository(engine), Pruning(engine)
    now = datetime.now(UTC)
    before = now - timedelta(days=days)

    def nameable(trial: Trial) -> Collection[str]:
        return nameable_with_fewer_features(
            repository, trial.problem, cpu=trial.cpu, context=trial.context
        )

    plan = pruning.plan(before=before, nameable=nameable)
    trials, kernels = len(plan.trials), len(plan.artifacts)
    if is_meant:
        report = pruning.remove(plan, actor=actor_here(), now=now, pause=time.sleep)
        trials, kernels = report.trials, report.artifacts
    engine.dispose()
    if as_json:
        print_json({"trials": trials, "kernels": kernels, "removed": is_meant})
        return
    told = (
        f"{counted(trials, 'trial')} from before {before:%Y-%m-%d} and {counted(kernels, 'kernel')}"
    )
    if is_meant:
        print_line(f"{told} removed")
    else:
        print_line(
            f"{told} ({bytes_text(plan.artifact_bytes)}) that no answer needs; remove with --delete"
        )


@db.command("mirror", help="Write the kernels that are served as files, for a static server")
def mirror_command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Root folder of the static server")
    ],
    url: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the kernels that are served as files, for a static server."""
    if not folder:  # a path of no name is the current folder
        raise InvalidSetting("folder '' has no name; give the one that a server has at its root.")
    check_public_folder(Path(folder), [url])
    engine = open_database(url, may_create=False)
    with ProgressLine("mirror", later_s=0) as line:
        show = pace(line)
        report = mirror(
            Repository(engine), Path(folder), lambda done, total: show("kernels", done, total)
        )
    engine.dispose()
    for reason in report.left_out:
        print_message(f"left out: {reason}")
    if as_json:
        print_json(
            {
                "written": report.written,
                "known": report.known,
                "removed": report.removed,
                "left_out": list(report.left_out),
            }
        )
    else:
        print_line(
            f"{counted(report.written, 'kernel')} written, {report.known} already there, "
            f"{report.removed} removed, {len(report.left_out)} left out"
        )
    if report.left_out:
        raise typer.Exit(1)
