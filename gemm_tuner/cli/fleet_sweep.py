"""`gemm-tuner sweep --scheduler`: the layers of a sweep, spread over the machines of a fleet."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress

import typer

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.jobs import job_facts
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_json, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import MAX_BUDGET_S, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting, MissingCapability, StoreFailed
from gemm_tuner.fleet.dispatcher import Dispatcher
from gemm_tuner.fleet.engine import DaskEngine
from gemm_tuner.fleet.scheduler import Scheduler
from gemm_tuner.fleet.spread import Question, Spread
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.progress import Progress

_EVERY_S = 0.5
_NOTICE = b"Stopping; what runs ends with the best so far. Press Ctrl-C again not to wait.\n"


def sweep_in_fleet(
    layers: Sequence[Layer],
    *,
    contexts: Sequence[ExecutionContext],
    wanted: Sequence[str],
    fleet: Scheduler,
    db: str | None,
    budget_s: float,
    as_json: bool,
) -> None:
    """Tune each layer in each context for the classes of CPUs that are wanted, and print the jobs.

    Raises:
        InvalidSetting: no worker has CPUs of a class that is wanted, or the budget is too large.
        MissingCapability: the scheduler does not answer, or has no worker, or there is no Dask.
    """
    if budget_s > MAX_BUDGET_S:
        raise InvalidSetting(
            f"budget {budget_s:g} s is too much for a job; give at most {MAX_BUDGET_S:g}s."
        )
    with closing(DaskEngine(fleet, print_message)) as there:
        places = there.places()
    questions = [
        Question(problem=layer.problem, class_key=class_key, context=context)
        for layer in layers
        for class_key in _classes(wanted, places, fleet)
        for context in layer.contexts_of(contexts)
    ]
    engine = open_database(db)
    jobs, owner = Jobs(engine), f"uid {os.getuid()}"
    spread = Spread(jobs, JobViews(engine), questions, budget_s=budget_s, owner=owner)
    dispatcher = Dispatcher(
        jobs=jobs, connect=lambda: DaskEngine(fleet, print_message), tell=print_message
    )
    with closing(dispatcher):
        is_stopped = _follow(spread, dispatcher, places)
    names = {layer.problem: layer.name for layer in layers}
    _print(spread, names, as_json=as_json)
    if is_stopped:
        print_message("Stopped; what was found is kept: run the same command again to resume.")
    if is_stopped or any(job.state is not JobState.DONE for job in spread.over.values()):
        raise typer.Exit(1)


def _classes(wanted: Sequence[str], places: Mapping[str, int], fleet: Scheduler) -> tuple[str, ...]:
    there = ", ".join(sorted(places))
    if not places:
        raise MissingCapability(
            f"no worker belongs to the fleet of {fleet.address}; start one: "
            f'"gemm-tuner worker --scheduler {fleet.address}".'
        )
    for class_key in wanted:
        if class_key not in places:
            raise InvalidSetting(
                f"no worker of the fleet has CPUs of the class {class_key[:80]!r}; "
                f"there are: {there}."
            )
    return tuple(dict.fromkeys(wanted)) or tuple(sorted(places))


def _follow(spread: Spread, dispatcher: Dispatcher, places: Mapping[str, int]) -> bool:
    """Place jobs until all are over; return whether the user ended it early."""
    with StopOnInterrupt(notice=_NOTICE) as interrupt, ProgressLine("fleet", later_s=0.0) as line:
        while not spread.is_over:
            if interrupt.is_stopped():
                spread.stop()
            with suppress(StoreFailed):  # the dispatcher says so, and when it goes on
                spread.step()
            dispatcher.step()
            line.show(
                Progress(
                    stage=f"{spread.running()} jobs run, done",
                    done=len(spread.over),
                    total=spread.count,
                    best_ratio=None,
                    remaining_s=spread.seconds_left(places),
                )
            )
            time.sleep(_EVERY_S)
        return interrupt.is_stopped()


def _print(spread: Spread, names: Mapping[Problem, str], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "jobs": [
                    {"name": names[question.problem], **job_facts(job)}
                    for question, job in spread.over.items()
                ],
                "not_over": spread.count - len(spread.over),
            }
        )
        return
    order = {problem: place for place, problem in enumerate(names)}
    over = sorted(spread.over.items(), key=lambda pair: (order[pair[0].problem], pair[0].class_key))
    print_table(
        f"{len(over)} of {counted(spread.count, 'job')} over",
        ("layer", "problem", "CPUs", "regime", "state", "what came out"),
        [
            (
                names[question.problem],
                question.problem.text,
                question.class_key,
                question.context.regime.value,
                job.state.value,
                job.detail,
            )
            for question, job in over
        ],
    )
