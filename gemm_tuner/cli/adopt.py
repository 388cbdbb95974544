"""`gemm-tuner adopt`: rebuild, prove and time what is recorded to win on this CPU model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Annotated

import typer
from sqlalchemy import Engine

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.reports.adopt_report import (
    AdoptedLayer,
    LeftLayer,
    adopted_facts,
    plan_facts,
    print_adopted,
    print_plan,
)
from gemm_tuner.cli.reports.sweep_report import LayerFailure, failure_facts
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt, aborting
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_json, print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError, InvalidSetting, PreparationStopped
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.recorded import Records, parse_records, problems_of, records_at_hand
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import database_file, default_database_url, open_database
from gemm_tuner.tuning.adopt import Adopted, Planned, expected_s, plan
from gemm_tuner.tuning.adopt import adopt as adopt_problem
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.settings import SweepSettings

_MOST_WARNINGS = 5  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A layer, and the contexts in which to adopt it, all of as many threads."""

    layer: Layer
    contexts: tuple[ExecutionContext, ...]


@dataclass(slots=True, kw_only=True)
class _Done:
    """What came of the layers; `is_stopped` says that the user ended it early."""

    adopted: list[AdoptedLayer] = field(default_factory=list)
    left: list[LeftLayer] = field(default_factory=list)
    failures: list[LayerFailure] = field(default_factory=list)
    not_begun: list[Layer] = field(default_factory=list)
    is_stopped: bool = False
    spent_s: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether each layer is up to date or was measured."""
        return (
            not (self.is_stopped or self.failures)
            and all(one.planned.is_current for one in self.left)
            and all(one.adopted.is_measured for one in self.adopted)
        )


def adopt(
    m: options.OptionalRows = None,
    n: options.OptionalColumns = None,
    k: options.OptionalDepth = None,
    *,
    shapes: options.Shapes = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeChoice = "hot",
    url: Annotated[
        str | None, typer.Option("--url", help="Also look at the records of this service")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget", help="Time for the rounds of each layer; slow calls get fewer rounds"
        ),
    ] = "4s",
    again: options.Again = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be timed, and how long it would take")
    ] = False,
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    as_json: options.AsJson = False,
) -> None:
    """Build, prove and time here what is recorded to win on this CPU model, and serve it.

    Without a layer, take every problem of this database whose verdict is of another generator,
    compiler or baseline, and say which verdicts changed. What is recorded comes from the database,
    the package, and a service. A sweep finds more, and takes longer.
    """
    is_renewal = m is None and shapes is None
    if is_renewal:
        _refuse_without_layer(
            {
                "--dtype": dtype != "f32",
                "--epilogue": epilogue != "none",
                "--w-layout": w_layout != "nk",
                "--groups": groups is not None,
                "--reduction": reduction != "any",
                "--operation": operation != "linear",
                "--threads": threads != 1,
                "--regime": regime != "hot",
            }
        )
    settings = SweepSettings(
        budget_s=options.parse_duration_s(budget),
        toolchain=find_toolchain(compiler),
        again=again,
    )
    cpu = detect_cpu()
    if is_renewal:
        repository = Repository(open_database(db, may_create=False, only_reads=dry_run))
        works = _known_works(repository, cpu)
    else:
        layers = layers_of(
            m=m,
            n=n,
            k=k,
            shapes=shapes,
            dtype=dtype,
            epilogue=epilogue,
            w_layout=options.with_groups(w_layout, groups),
            reduction=reduction,
            operation=operation,
        )
        contexts = options.execution_contexts(threads, regime)
        check_cpus(threads)
        repository = Repository(_store_to_plan(db) if dry_run else open_database(db))
        works = [_Work(layer=layer, contexts=contexts) for layer in layers]
    elsewhere = _records_of_service(url, works, cpu) if url is not None else {}

    adoption = _Adoption(
        works=works, cpu=cpu, repository=repository, settings=settings, elsewhere=elsewhere
    )
    if dry_run:
        adoption.print_plan(as_json=as_json)
        return
    done = adoption.run()
    _print_done(done, cpu, as_json=as_json, is_renewal=is_renewal)
    if not done.is_whole:
        raise typer.Exit(1)


def _print_done(done: _Done, cpu: Cpu, *, as_json: bool, is_renewal: bool) -> None:
    if as_json:
        print_json(
            {
                "cpu": cpu.brand,
                **adopted_facts(done.adopted, done.left),
                "failures": [failure_facts(failure) for failure in done.failures],
                "not_begun": [layer.name for layer in done.not_begun],
            }
        )
    else:
        print_adopted(done.adopted, done.left, cpu, is_renewal=is_renewal)
    if done.is_stopped:
        print_message("Stopped; what was found is kept: run the same command again to go on.")


def _store_to_plan(db: str | None) -> Engine:
    """Return the database to plan with, which is empty where there is none: a plan makes none."""
    file = database_file(db or default_database_url())
    is_none = file is not None and not file.exists()
    return open_database("sqlite:///:memory:" if is_none else db, only_reads=True)


def _refuse_without_layer(options_given: Mapping[str, bool]) -> None:
    for name, is_given in options_given.items():
        if is_given:
            raise InvalidSetting(
                f"{name} is of a layer, and there is none; give M N K or --shapes FILE, or leave "
                f"out {name}."
            )


def _known_works(repository: Repository, cpu: Cpu) -> list[_Work]:
    """Return every problem that was measured here, once for each number of threads."""
    found: dict[tuple[Problem, int], list[ExecutionContext]] = {}
    for problem, context in problems_of(repository, cpu):
        found.setdefault((problem, context.threads), []).append(context)
    return [
        _Work(layer=Layer(name=problem.sizes_text, problem=problem), contexts=tuple(contexts))
        for (problem, _threads), contexts in found.items()
    ]


def _records_of_service(url: str, works: Sequence[_Work], cpu: Cpu) -> dict[Problem, Records]:
    """Return the records that a service has of each problem."""
    from gemm_tuner.client.records import lines_at  # noqa: PLC0415 - slow to load
    from gemm_tuner.client.transport import Address  # noqa: PLC0415

    shown = Address.parse(url).url  # without a password
    print_message(f"Reading the records of {shown} …")
    lines: dict[Problem, list[tuple[str, str]]] = {}
    with aborting():
        for problem, line in lines_at(url, {work.layer.problem for work in works}, cpu):
            of_problem = lines.setdefault(problem, [])
            of_problem.append((f"record {len(of_problem) + 1} of {shown}", line))
    return {problem: parse_records(each, shown) for problem, each in lines.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adoption:
    """Layers to adopt here, with what a service has recorded `elsewhere` of their problems."""

    works: Sequence[_Work]
    cpu: Cpu
    repository: Repository
    settings: SweepSettings
    elsewhere: Mapping[Problem, Records]

    def print_plan(self, *, as_json: bool) -> None:
        """Print what would be timed."""
        planned = [(work.layer, self._plan(work)) for work in self.works]
        if as_json:
            facts = plan_facts(planned, self.cpu, self.settings)
            print_json({"cpu": self.cpu.brand, "layers": facts})
        else:
            print_plan(planned, self.cpu, self.settings)

    def run(self) -> _Done:
        """Adopt one layer after the other, until the user stops it."""
        done = _Done()
        with StopOnInterrupt() as interrupt:
            for position, work in enumerate(self.works):
                if interrupt.is_stopped():
                    done.not_begun.append(work.layer)
                    continue
                try:
                    adopted = self._adopt(position, work, done, interrupt.is_stopped)
                except PreparationStopped:  # while another measured
                    done.not_begun.append(work.layer)
                    continue
                except GemmTunerError as error:
                    if len(self.works) == 1:
                        raise
                    print_message(f"Error: {work.layer.name} is not adopted: {error}")
                    done.failures.append(LayerFailure(layer=work.layer, error=error))
                    continue
                if adopted:
                    done.spent_s.append(adopted[0].took_s)
                    done.adopted += [AdoptedLayer(layer=work.layer, adopted=one) for one in adopted]
                    _warn_of(work.layer, adopted)
            done.is_stopped = interrupt.is_stopped()
        return done

    def _plan(self, work: _Work) -> tuple[Planned, ...]:
        """Return what is to be done for a layer; say what cannot be tried."""
        problem = work.layer.problem
        records = records_at_hand(self.repository, problem, self.cpu)
        records += self.elsewhere.get(problem, Records(found=()))
        planned = plan(
            problem,
            work.contexts,
            cpu=self.cpu,
            repository=self.repository,
            settings=self.settings,
            records=records,
        )
        left_out = [text for one in planned if not one.is_current for text in one.winners.left_out]
        told = list(dict.fromkeys((*records.faults, *left_out)))
        for text in told[:_MOST_WARNINGS]:
            print_message(f"Warning: {work.layer.name}: {text}")
        if len(told) > _MOST_WARNINGS:
            print_message(f"Warning: {work.layer.name}: and {len(told) - _MOST_WARNINGS} more")
        return planned

    def _adopt(
        self, position: int, work: _Work, done: _Done, is_stopped: Callable[[], bool]
    ) -> tuple[Adopted, ...]:
        """Return what was found for a layer, nothing where nothing is to be done; note that."""
        layer = work.layer
        planned = self._plan(work)
        to_do = [one for one in planned if one.winners.winners and not one.is_current]
        done.left += [LeftLayer(layer=layer, planned=one) for one in planned if one not in to_do]
        if not to_do:
            return ()
        # A layer takes about as long as those before it did.
        each_s = done.spent_s or [expected_s(layer.problem, to_do, self.cpu, self.settings)]
        pace = partial(
            _show_at_pace,
            begun_s=monotonic(),
            each_s=sum(each_s) / len(each_s),
            later=len(self.works) - position - 1,
            candidates=len({one for each in to_do for one in each.winners.candidates}),
        )
        label = f"{layer.name} ({position + 1} of {len(self.works)})"
        with measuring(is_stopped), ProgressLine(label, later_s=0.0) as progress:
            return adopt_problem(
                layer.problem,
                to_do,
                cpu=self.cpu,
                repository=self.repository,
                settings=self.settings,
                on_progress=partial(pace, progress),
                is_stopped=is_stopped,
            )


def _warn_of(layer: Layer, adopted: Sequence[Adopted]) -> None:
    """Warn of what a sweep noted, and of recorded kernels that are wrong here."""
    _warn(layer, [one.result.note for one in adopted])
    _warn(
        layer,
        [
            f"{trial.candidate.text} is refuted here: {trial.outcome.value}"
            for trial in adopted[0].failed
        ],
    )


def _warn(layer: Layer, texts: Sequence[str]) -> None:
    for text in Counter(filter(None, texts)):
        print_message(f"Warning: {layer.name}: {text}")


def _show_at_pace(
    progress: ProgressLine,
    step: Progress,
    *,
    begun_s: float,
    each_s: float,
    later: int,
    candidates: int,
) -> None:
    """Show a step of some candidates with the time left: the budget is far more than it takes."""
    left_s = max(0.0, each_s - (monotonic() - begun_s)) + later * each_s
    progress.show(replace(step, total=max(step.done, candidates), remaining_s=left_s))
