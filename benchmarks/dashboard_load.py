"""Ask the service for its pages over a database with many trials, and print how long each takes.

    python benchmarks/dashboard_load.py [--trials 1000000] [--postgres] [--write]

The database is made of the records in tuning_db, once, and kept in --folder; on a private
PostgreSQL server, it is made anew. One service process runs on the first CPU, and this process asks
from the last over loopback. The first time of a page is that of a process that just started, or of
figures that it has not drawn; the others come after a pause in which it draws, and are a page each
time that nobody saw before, where there are several. `--write` writes the section on pages of
docs/service-performance.md.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import httpx
from dashboard_databases import JOBS, fill_pages
from service_load import (
    REPORT,
    command_text,
    conditions,
    made_once,
    postgres_database,
    service,
)
from sqlalchemy import func, select

from gemm_tuner.domain.access import Scope
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.tables import cpus, trials, verdicts
from gemm_tuner.store.tokens import Tokens

ROWS = 1  # raised when what a row holds changes: databases are kept
TIMES = 15
PAUSE_S = 3.0  # after the first look at a page
HEADING = "## Pages\n"
EXPLAINED = (
    "One of the problems has a tenth of the trials. The first time of a page is without the "
    "pictures that it needs: another process draws them, with a low priority and on the same CPU. "
    "Verdicts are counted as a service starts, and what changed later beside the pages: one that "
    "would wait longer than 0.1 s shows the former count with its time."
)


def main() -> None:
    """Make the databases, ask for each page, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL too")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/gemm-tuner-load")
    parser.add_argument("--write", action="store_true", help=f"write into {REPORT.name}")
    asked = parser.parse_args()
    os.environ["XDG_DATA_HOME"] = str(asked.folder)  # a measuring key and a signing key of its own
    asked.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    databases = [("SQLite", sqlite_database(asked.folder, asked.trials))]
    if asked.postgres:
        databases.append(
            (
                "PostgreSQL",
                postgres_database(
                    partial(fill_pages, wanted=asked.trials), f"{asked.trials} trials"
                ),
            )
        )
    tables = []
    for kind, database in databases:
        with database as url:
            tables.append(measure(kind, url))
    text = "\n".join(tables)
    sys.stdout.write(f"{text}\n{conditions()}\n")
    if asked.write:
        before = REPORT.read_text().partition(f"\n{HEADING}")[0].rstrip()
        REPORT.write_text(
            f"{before}\n\n{HEADING}\nTimes of a page in ms, from the request to its last byte, by "
            f"`{command_text()}`. {EXPLAINED}\n\n{text}\n{conditions()}\n"
        )


@contextmanager
def sqlite_database(folder: Path, count: int) -> Iterator[str]:
    """Yield the URL of a database with so many trials, made unless it is there."""
    file = folder / f"pages-{count}-{ROWS}.sqlite3"
    yield made_once(file, partial(fill_pages, wanted=count), f"{count} trials")


def measure(kind: str, url: str) -> str:
    """Return the table of one database."""
    pages, counted = pages_of(url)
    secret = admin_of(url)
    lines = [
        f"| {kind}: {counted} | first | median | slowest | KiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    with (
        service(url) as (host, port, _pid),
        httpx.Client(
            base_url=f"http://{host}:{port}", headers={"Authorization": f"Bearer {secret}"}
        ) as client,
    ):
        client.get("/healthz")  # answered once the process has started, which is no page's time
        for name, places in pages.items():
            times_ms, size = [], 0
            for turn in range(max(TIMES, len(places))):
                begin_s = time.perf_counter()
                answer = client.get(places[turn % len(places)])
                times_ms.append(1e3 * (time.perf_counter() - begin_s))
                if answer.status_code != 200:
                    raise SystemExit(f"{places[turn % len(places)]}: {answer.text}")
                size = len(answer.content)
                if turn == 0:
                    time.sleep(PAUSE_S)
            first, *later = times_ms
            lines.append(
                f"| {name} | {first:.0f} | {median(later):.0f} | {max(later):.0f} | "
                f"{size / 1024:.0f} |"
            )
    return "\n".join(lines) + "\n"


def admin_of(url: str) -> str:
    """Return a new token that may see everything."""
    engine = open_database(url)
    secret = Tokens(engine).create("load", list(Scope), actor="load", now=datetime.now(UTC))[1]
    engine.dispose()
    return secret.text


def place_of(problem_key: str, cpu_key: str, threads: int, regime: str) -> str:
    """Return the page of a problem in a place."""
    return f"/problems/{problem_key}?cpu={cpu_key}&threads={threads}&regime={regime}"


def pages_of(url: str) -> tuple[dict[str, list[str]], str]:
    """Return the pages to ask for, and in words what the database holds."""
    engine = open_database(url)
    with engine.connect() as connection:
        known = connection.scalar(select(func.count()).select_from(trials))
        decided = connection.scalar(select(func.count()).select_from(verdicts))
        keys = connection.scalars(select(cpus.c.exact_key).order_by(cpus.c.id)).all()
        most = connection.execute(
            select(trials.c.problem_id, cpus.c.exact_key, trials.c.threads, trials.c.regime)
            .join(cpus, cpus.c.id == trials.c.cpu_id)
            .order_by(trials.c.sequence.desc())
            .limit(1)
        ).one()
        some = connection.execute(
            select(verdicts.c.problem_id, verdicts.c.cpu_key, verdicts.c.threads, verdicts.c.regime)
            .order_by(verdicts.c.problem_id)
            .limit(TIMES)
        ).all()
        artifact = connection.scalar(select(verdicts.c.artifact).limit(1))
    engine.dispose()
    problems = [place_of(*row) for row in some]
    of_most = place_of(*most)
    with service(url) as (host, port, _pid):
        place = f"http://{host}:{port}"
        second = re.search(r'href="([^"]*cursor=[^"]*)"', httpx.get(f"{place}/cpus/{keys[0]}").text)
        older = re.search(r'href="([^"]*before=[^"]*)"', httpx.get(f"{place}{of_most}").text)
    assert second is not None
    assert older is not None
    return {
        "overview": ["/"],
        "CPUs": ["/cpus"],
        "a CPU": [f"/cpus/{key}" for key in keys[:TIMES]],
        "its ties": [f"/cpus/{key}?standing=tie" for key in keys[:TIMES]],
        "its second page": [second[1].replace("&amp;", "&")],
        "a problem": problems,
        "one with a tenth of all trials": [of_most],
        "its second page of trials": [older[1].replace("&amp;", "&")],
        "a kernel": [f"/kernels/{artifact}"],
        f"jobs, of {JOBS:,}": ["/jobs", "/jobs?state=failed"],
        "wanted": ["/wanted"],
    }, f"{known:,} trials, {decided:,} verdicts"


if __name__ == "__main__":
    main()
