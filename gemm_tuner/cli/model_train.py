"""`gemm-tuner model train`: a ranker of candidates from recordings, and from a store."""

from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.terminal.output import print_line
from gemm_tuner.domain.units import counted
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.replay.recording import read_recordings, recording_path
from gemm_tuner.replay.training import examples_in, examples_of, train
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.strategies.ranker import own_ranker_path, write_ranker


def train_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="What was recorded; by default that of this CPU"),
    ] = None,
    *,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="URL",
            callback=options.kept_url,
            help="Learn from the timings in a database as well",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="By default ranker.json in your data directory"),
    ] = None,
) -> None:
    """Train a ranker of candidates on recorded trials, by scikit-learn.

    "gemm-tuner sweep --strategy learned" searches by it, and needs no scikit-learn.
    """
    cpu = detect_cpu()
    own = recording_path(cpu)
    paths = files or ([own] if own.exists() or db is None else [])
    check_place(out, databases=[db], others=paths, makes_folder=True)
    examples = examples_of([one for path in paths for one in read_recordings(path)])
    if db is not None:
        examples += examples_in(Repository(open_database(db, may_create=False)), cpu)
    ranker = train(examples)
    path = out or own_ranker_path()
    write_ranker(path, ranker)
    count = sum(len(one.speeds) for one in examples)
    print_line(
        f"{counted(len(ranker.trees), 'tree')} in {path}, from {counted(count, 'candidate')} of "
        f"{counted(len(examples), 'search', 'searches')}"
    )
