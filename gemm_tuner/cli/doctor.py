"""`gemm-tuner doctor`: does this machine measure well, and is all there that tuning needs?"""

from math import ceil
from typing import Any

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.doctor.examine import Surroundings, examine
from gemm_tuner.domain.check import Check, Level
from gemm_tuner.domain.units import counted
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.sql.database import database_file, default_database_url
from gemm_tuner.tuning.progress import Progress

_INTERRUPTED = 130


def doctor(*, db: options.DatabaseUrl = None, as_json: options.AsJson = False) -> None:
    """Check that this machine measures well and has what tuning needs; exit 1 if not."""
    url = db or default_database_url()
    database_file(url)  # a mistyped URL is an error before anything is measured
    here = Surroundings(cpu=detect_cpu(), url=url)
    checks: list[Check] = []
    is_stopped = False
    with ProgressLine("doctor", later_s=0) as line:

        def tell(stage: str, spent_s: float, seconds: float) -> None:
            line.show(
                Progress(
                    stage=f"{stage}, second",
                    done=min(int(spent_s) + 1, ceil(seconds)),
                    total=ceil(seconds),
                    best_ratio=None,
                    remaining_s=max(0.0, round(seconds - spent_s, 1)),
                )
            )

        try:
            for check in examine(here, tell):
                checks.append(check)  # noqa: PERF402 - what was found stays when this is stopped
        except KeyboardInterrupt:
            is_stopped = True
    problems = sum(check.level is Level.PROBLEM for check in checks)
    notes = sum(check.level is Level.NOTE for check in checks)
    if as_json:
        print_json(
            {
                "problems": problems,
                "notes": notes,
                "is_complete": not is_stopped,
                "checks": [_facts(check) for check in checks],
            }
        )
    else:
        print_table(
            f"{counted(len(checks), 'check')}: {_or_no(problems, 'problem')}, "
            f"{_or_no(notes, 'note')}",
            ("check", "level", "what was seen, and what to do"),
            [(check.name, check.level.value, _told(check)) for check in checks],
        )
    if is_stopped:
        print_message("Stopped; the checks that were made are above.")
        raise typer.Exit(_INTERRUPTED)
    if problems:
        raise typer.Exit(1)


def _told(check: Check) -> str:
    return f"{check.seen}. To do: {check.advice}." if check.advice else f"{check.seen}."


def _or_no(count: int, noun: str) -> str:
    return counted(count, noun) if count else f"no {noun}s"


def _facts(check: Check) -> dict[str, Any]:
    return {
        "check": check.name,
        "level": check.level.value,
        "seen": check.seen,
        "advice": check.advice or None,
        "figures": dict(check.figures),
    }
