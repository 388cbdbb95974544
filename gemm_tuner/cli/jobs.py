"""`gemm-tuner jobs`: what is to be tuned, how far it is, and what came out."""

import os
import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.domain.job import DEFAULT_BUDGET_S, Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import context_text, counted, duration_text, time_text
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database

jobs = typer.Typer(
    help="Ask workers to tune layers, and print what came out", no_args_is_help=False
)

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="Its id as in the list, or the first digits")
]
_ID = re.compile("[0-9a-f]{4,32}")


@jobs.command("submit", help="Ask workers for a layer on CPUs like this one, and print the job")
def submit_command(
    m: options.Rows,
    n: options.Columns,
    k: options.Depth,
    *,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    budget: options.Budget = f"{DEFAULT_BUDGET_S:g}s",
    priority: Annotated[
        int, typer.Option("--priority", help="From -100 to 100; the greatest is run first")
    ] = 0,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask workers for a layer on CPUs like this one, and print the job."""
    layout = options.with_groups(w_layout, groups)
    cpu, now = detect_cpu(), datetime.now(UTC)
    store = Jobs(open_database(db))
    job, is_new = store.submit(
        Problem.create(
            m,
            n,
            k,
            dtype=dtype,
            w_layout=layout,
            epilogue=epilogue,
            reduction=reduction,
            operation=operation,
        ),
        class_key=cpu.class_key,
        context=options.execution_context(threads, regime),
        budget_s=options.parse_duration_s(budget),
        priority=priority,
        owner=f"uid {os.getuid()}",
        idempotency_key=None,
        now=now,
    )
    if as_json:
        print_json({**job_facts(job), "is_new": is_new})
    else:
        print_line(f"job {job.id}: {job.problem.text}, {'new' if is_new else 'asked for before'}")
    if not store.has_worker(cpu.class_key, now):
        print_message('No worker for such CPUs runs now; start one: "gemm-tuner worker".')


@jobs.command("list", help="Print the newest jobs")
def list_command(
    state: Annotated[
        str | None, typer.Option("--state", help=f"Only these: {', '.join(JobState)}")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="Print so many at most")
    ] = 20,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the newest jobs."""
    store = Jobs(open_database(db, may_create=False))
    known = store.several(ids := store.newest_ids(limit, state=_parse_state(state)))
    for one in ids:
        if isinstance(fault := known.get(one), StoreFailed):
            print_message(f"Job {one} is left out: {fault}")
    found = [job for one in ids if isinstance(job := known.get(one), Job)]
    if as_json:
        print_json([job_facts(job) for job in found])
        return
    print_table(
        f"{counted(len(found), 'job')}, the newest first",
        ("id", "layer", ">threads", "regime", "state", "asked for", "what came out"),
        [
            (
                job.id[:8],
                job.problem.text,
                str(job.context.threads),
                job.context.regime.value,
                job.state.value,
                f"{job.created_at:%Y-%m-%d %H:%M}",
                job.detail or _progress_text(job),
            )
            for job in found
        ],
    )


@jobs.command("show", help="Print one job; exit with 1 if there is none")
def show_command(
    job_id: JobId, db: options.DatabaseUrl = None, as_json: options.AsJson = False
) -> None:
    """Print one job; exit with 1 if there is none."""
    job = _found(Jobs(open_database(db, may_create=False)), job_id)
    if as_json:
        print_json(job_facts(job))
        return
    print_line(f"job {job.id}: {job.problem.text}")
    print_line(
        f"  {context_text(job.context)}, for CPUs {job.class_key}, "
        f"at most {duration_text(job.budget_s)}, priority {job.priority}, asked by {job.owner}"
    )
    print_line(f"  {job.state.value}, {_progress_text(job)}")
    if job.detail:
        print_line(f"  {job.detail}")


@jobs.command("cancel", help="Cancel a job, which keeps the best so far; exit with 1 if it is over")
def cancel_command(job_id: JobId, db: options.DatabaseUrl = None) -> None:
    """Cancel a job, which keeps the best so far; exit with 1 if it is over."""
    store = Jobs(open_database(db, may_create=False))
    job = _found(store, job_id)
    if job.state.is_over:
        print_line(f"Job {job.id} is over: {job.state.value}.")
        raise typer.Exit(1)
    store.cancel(job.id, datetime.now(UTC))
    is_running = job.state is JobState.RUNNING
    print_line(
        f"Job {job.id} ends in some seconds, with the best so far."
        if is_running
        else f"Job {job.id} is cancelled."
    )


def _found(store: Jobs, text: str) -> Job:
    """Return the job whose id begins with a text; if there is none, say so and exit with 1."""
    if not _ID.fullmatch(text):
        raise InvalidSetting(f"{text[:80]!r} is no id of a job; give 4 to 32 of its hex digits.")
    matching = store.starting_with(text)
    if len(matching) > 1:
        raise InvalidSetting(f"several jobs begin with {text}; give more digits.")
    if not matching:
        print_line(f"There is no job {text}.")
        raise typer.Exit(1)
    return matching[0]


def _parse_state(text: str | None) -> JobState | None:
    try:
        return None if text is None else JobState(text)
    except ValueError:
        known = ", ".join(JobState)
        raise InvalidSetting(f"state {text!r} is not known; use one of: {known}.") from None


def _progress_text(job: Job) -> str:
    progress = job.progress
    parts = [f"{progress.tried} tried, {progress.failed} failed"]
    if progress.best_ns is not None and progress.over_baseline is not None:
        parts.append(f"best {time_text(progress.best_ns)}, {progress.over_baseline:.2f} x baseline")
    if progress.seconds_left:
        parts.append(f"{duration_text(progress.seconds_left)} left")
    return ", ".join(parts)


def job_facts(job: Job) -> dict[str, object]:
    """Return what JSON says of a job."""
    progress = job.progress
    return {
        "id": job.id,
        "problem": job.problem.text,
        "class_key": job.class_key,
        "threads": job.context.threads,
        "regime": job.context.regime.value,
        "budget_s": job.budget_s,
        "priority": job.priority,
        "state": job.state.value,
        "owner": job.owner,
        "created_at": job.created_at.isoformat(),
        "changed_at": job.changed_at.isoformat(),
        "worker": job.worker,
        "attempts": job.attempts,
        "progress": {
            "tried": progress.tried,
            "failed": progress.failed,
            "best_ns": progress.best_ns,
            "over_baseline": progress.over_baseline,
            "seconds_left": progress.seconds_left,
        },
        "is_cancel_asked": job.is_cancel_asked,
        "detail": job.detail,
    }
