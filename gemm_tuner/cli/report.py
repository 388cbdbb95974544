"""`gemm-tuner report`: what a database holds, as a page to put before others."""

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy import make_url

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.plotting import check_plots
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.output import print_json, print_line
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.domain.facts import ratio_facts
from gemm_tuner.domain.printable import quoted
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.store.sql.database import database_file, default_database_url, open_database
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.user_file import user_file

if TYPE_CHECKING:
    from gemm_tuner.cli.reports.page.answers import Answer, Contents


def report(
    *,
    db: options.DatabaseUrl = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            callback=options.kept_url,
            help="Compare with this database, answer by answer",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Where to write the page")] = Path(
        "gemm-tuner-report.html"
    ),
    as_json: options.AsJson = False,
) -> None:
    """Write what a database holds, or how two differ, as one HTML file to show to others."""
    urls = [db or default_database_url(), *([compare] if compare is not None else [])]
    check_place(out, databases=urls)
    check_plots("a report")
    from gemm_tuner.cli.reports.page.html import write_comparison, write_page  # noqa: PLC0415 - has plots

    with aborting():
        read = [_read(url) for url in urls]
        now, version = datetime.now(UTC), generator_version()
        with ProgressLine("report", later_s=0) as line:
            page = (
                write_page(read[0], at=now, by=version, tell=partial(pace(line), "groups drawn"))
                if compare is None
                else write_comparison(*read, at=now, by=version)
            )
        content = page.encode(errors="backslashreplace")
        with user_file(out) as file:
            file.write(content)
    if as_json:
        print_json(
            {
                "file": str(out),
                "size_bytes": len(content),
                "databases": [_facts(contents) for contents in read],
            }
        )
    else:
        answers = " and ".join(counted(len(contents.answers), "answer") for contents in read)
        print_line(f"{answers} written to {out} ({bytes_text(len(content))})")


def _read(url: str) -> "Contents":
    from gemm_tuner.cli.reports.page.answers import read_contents  # noqa: PLC0415 - long to load

    name = _name_of(url)
    with ProgressLine("report", later_s=0) as line:
        engine = open_database(url, may_create=False, only_reads=True)
        try:
            contents = read_contents(engine, name, partial(pace(line), f"problems of {name}"))
        finally:
            engine.dispose()
    if not contents.answers:
        raise GemmTunerError(
            f"the database {quoted(name)} has no confirmed kernel to report of; "
            '"gemm-tuner sweep" finds some, "gemm-tuner records import --shipped" takes those '
            "that come with the package, and --db names another database."
        )
    return contents


def _name_of(url: str) -> str:
    """Return how a page names a database: its file or its own name, without folder and host."""
    file = database_file(url)
    return quoted(file.name if file else (make_url(url).database or "the database"))


def _facts(contents: "Contents") -> dict[str, Any]:
    return {
        "name": contents.name,
        "quorum": contents.quorum,
        "answers": [_answer_facts(answer) for answer in contents.answers],
        "unanswered": contents.unanswered,
        "outcomes": {outcome.value: count for outcome, count in contents.outcomes.items()},
        "time_until": {
            step.value: {"records": spent.records, "seconds": spent.seconds}
            for step, spent in contents.spent.items()
        },
    }


def _answer_facts(answer: "Answer") -> dict[str, Any]:
    verdict, measured, search = answer.verdict, answer.measured, answer.search
    return {
        "problem": verdict.problem.text,
        "cpu": answer.cpu.brand,
        "cpu_key": verdict.cpu_key,
        "threads": verdict.context.threads,
        "regime": verdict.context.regime.value,
        "decision": verdict.decision.value,
        "doubt": verdict.doubt,
        "complete": verdict.complete,
        "rests_on": answer.standing.value,
        "hosts": answer.hosts,
        "baseline": measured.baseline,
        "ratio": ratio_facts(measured.ratio),
        "kernel_ns": measured.candidate_median_ns,
        "baseline_ns": measured.baseline_median_ns,
        "gflop_per_s": answer.gflop_per_s,
        "share_of_peak": answer.share_of_peak,
        "candidate": verdict.candidate.text if verdict.candidate else None,
        "generator": verdict.generator,
        "compiler": answer.toolchain,
        "tried_at": verdict.tried_at.isoformat() if verdict.tried_at else None,
        "candidates_tried": search.tried,
        "candidates_failed": search.failed,
        "timings": len(search.best_ns),
        "timings_to_within_2_percent": search.settled_at,
    }
