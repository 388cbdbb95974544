"""`gemm-tuner sweep`: tune one layer, or every layer of a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.reports.range_report import check_ranges, split_ranges
from gemm_tuner.cli.reports.sharing_report import (
    SharedLayers,
    print_shared,
    share_layers,
    shared_facts,
    sharing_groups,
)
from gemm_tuner.cli.reports.sweep_report import (
    LayerFailure,
    failure_facts,
    print_result,
    print_summary,
    result_facts,
    summary_facts,
)
from gemm_tuner.cli.scheduler import fleet_of
from gemm_tuner.cli.target import predict_layers
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.layer_problems import MAX_LOSS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import duration_text
from gemm_tuner.errors import GemmTunerError, InvalidSetting, PreparationStopped
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.price import price_of_fixed_order
from gemm_tuner.space.cores import core_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.strategies.ranker import own_ranker_path, read_ranker
from gemm_tuner.strategies.table import DEFAULT, LEARNED, STRATEGIES, Plan
from gemm_tuner.tuning.estimate import estimate
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep as sweep_problem
from gemm_tuner.tuning.sweep_shared import split_budget

Choose = Callable[[Problem], Sequence[Candidate]]


@dataclass(slots=True, kw_only=True)
class SweptLayers:
    """The results of sweeping some layers; `is_stopped` says that the user ended it early."""

    found: list[tuple[Layer, SweepResult]] = field(default_factory=list)
    failures: list[LayerFailure] = field(default_factory=list)
    not_begun: list[Layer] = field(default_factory=list)
    is_stopped: bool = False


def sweep(
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
    budget: options.Budget = "30s",
    again: options.Again = False,
    target: options.Target = None,
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    strategy: Annotated[
        str,
        options.of_tuning("--strategy", help=f"How to search: one of {', '.join(STRATEGIES)}"),
    ] = DEFAULT,
    ranker: options.RankerFile = None,
    as_json: options.AsJson = False,
    share_weights: Annotated[
        bool,
        options.of_several_rows(
            "--share-weights",
            help="Find kernels of several m, as in 1,16,128, that read one packed copy of the "
            "weights; takes a third of the budget",
        ),
    ] = False,
    max_loss: Annotated[
        float,
        options.of_several_rows(
            "--max-loss", help="With --share-weights: percent of its speed that an m may lose"
        ),
    ] = 100 * MAX_LOSS,
    split_range: Annotated[
        bool,
        options.of_several_rows(
            "--split-range",
            help="Make one library of a few kernels for a range of m, as in 1..512, and say what "
            "each m loses; the budget is for each m that is measured",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many candidates and seconds it would take")
    ] = False,
    scheduler: options.SchedulerAddress = None,
    cpu_classes: Annotated[
        list[str] | None,
        options.of_fleet(
            "--cpu",
            metavar="CLASS",
            help="With --scheduler: tune for this class of CPUs; by default for each that a "
            "worker has; may be given several times",
        ),
    ] = None,
    tls_ca: options.TlsAuthority = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
) -> None:
    """Tune a layer, or those of a file, and print the autotuning table.

    What was tried is kept as it happens: Ctrl-C loses nothing, and a second run resumes. A layer of
    several that cannot be swept is reported, and the others are swept.

    With --scheduler, the workers of a fleet tune, on CPUs of several classes at once.
    """
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
    budget_s = options.parse_duration_s(budget)
    if max_loss != 100 * MAX_LOSS and not share_weights:
        raise InvalidSetting(
            "--max-loss is what a layer that shares weights may lose; give --share-weights too."
        )
    fleet = fleet_of(scheduler, tls_ca, tls_cert, tls_key)
    if fleet is not None:
        _refuse_what_is_local(
            {
                "--again": again,
                "--share-weights": share_weights,
                "--split-range": split_range,
                "--dry-run": dry_run,
                "--target": target is not None,
                "--compiler": compiler is not None,
                "--strategy": strategy != DEFAULT,
                "--ranker": ranker is not None,
            }
        )
        _sweep_in_fleet(
            layers,
            contexts=contexts,
            wanted=tuple(cpu_classes or ()),
            fleet=fleet,
            db=db,
            budget_s=budget_s,
            as_json=as_json,
        )
        return
    _refuse_without_fleet(cpu_classes)
    settings = SweepSettings(
        budget_s=budget_s,
        toolchain=find_toolchain(compiler),
        again=again,
        plan=_plan(strategy, ranker),
    )
    loss = options.parse_percent("--max-loss", max_loss)
    alike = sharing_groups(layers, loss) if share_weights else []
    if target is not None:
        _refuse_what_times(
            target,
            {
                "--dry-run": dry_run,
                "--share-weights": share_weights,
                "--split-range": split_range,
                "--again": again,
                "--strategy": strategy != DEFAULT,
            },
        )
        predict_layers(
            layers,
            contexts=contexts,
            cpu=core_named(target).cpu,
            repository=Repository(open_database(db)),
            settings=settings,
            as_json=as_json,
        )
        return
    check_cpus(threads)
    cpu = detect_cpu()
    if split_range:
        others = {
            "--share-weights": share_weights,
            "--dry-run": dry_run,
            "--strategy": strategy != DEFAULT,
        }
        check_ranges(layers, others)
        split_ranges(
            layers,
            contexts=contexts,
            cpu=cpu,
            repository=Repository(open_database(db)),
            settings=settings,
            as_json=as_json,
        )
        return
    if dry_run:
        _print_estimate(layers, contexts, cpu, settings, as_json=as_json)
        return

    _sweep_here(
        layers,
        alike,
        contexts=contexts,
        cpu=cpu,
        repository=Repository(open_database(db)),
        settings=settings,
        max_loss=loss,
        as_json=as_json,
    )


def _sweep_here(
    layers: tuple[Layer, ...],
    alike: Sequence[tuple[Problem, ...]],
    *,
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    max_loss: float,
    as_json: bool,
) -> None:
    """Sweep layers on this machine, then those `alike` for weights that they share, and print.

    Raises:
        typer.Exit: it was stopped, or something could not be swept.
    """
    own_settings, shared_settings = split_budget(settings) if alike else (settings, settings)
    swept = sweep_layers(
        layers,
        contexts=contexts,
        cpu=cpu,
        repository=repository,
        settings=own_settings,
        is_quiet=as_json,
        later_s=sum(map(len, alike)) * shared_settings.budget_s,
    )
    failed = {failure.layer.problem for failure in swept.failures}
    shared = SharedLayers(is_stopped=swept.is_stopped)
    if alike and not swept.is_stopped:
        shared = share_layers(
            [group for group in alike if failed.isdisjoint(group)],
            contexts=contexts,
            cpu=cpu,
            repository=repository,
            settings=shared_settings,
            max_loss=max_loss,
        )

    _print_swept(
        layers,
        swept,
        shared,
        max_loss=max_loss,
        cpu=cpu,
        repository=repository,
        as_json=as_json,
    )
    if shared.is_stopped:
        print_message("Stopped; what was found is kept: run the same command again to resume.")
    if shared.is_stopped or swept.failures or not shared.is_complete:
        raise typer.Exit(1)


def _print_swept(
    layers: tuple[Layer, ...],
    swept: SweptLayers,
    shared: SharedLayers,
    *,
    max_loss: float,
    cpu: Cpu,
    repository: Repository,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "cpu": cpu.brand,
                "layers": [
                    result_facts(
                        layer, result, price_of_fixed_order(repository, result.verdict, cpu)
                    )
                    for layer, result in swept.found
                ],
                "failures": [failure_facts(failure) for failure in swept.failures],
                "not_begun": [layer.name for layer in swept.not_begun],
                "summary": summary_facts([result.verdict for _layer, result in swept.found]),
                "shared": [shared_facts(one, max_loss) for one in shared.found],
            }
        )
    else:
        if len(layers) > 1:
            print_summary(swept.found, swept.failures, swept.not_begun)
        for one in shared.found:
            print_shared(one, max_loss)


def _plan(strategy: str, ranker: Path | None) -> Plan:
    """Return the plan of a search; the learned strategy has this ranker or the user's own."""
    if strategy != LEARNED:
        if ranker is not None:
            raise InvalidSetting(f"--ranker is for --strategy {LEARNED}; leave it out.")
        return Plan(name=strategy)
    return Plan(name=strategy, ranker=read_ranker(ranker or own_ranker_path()))


def _sweep_in_fleet(layers: tuple[Layer, ...], **named: Any) -> None:  # noqa: ANN401 - passed on
    from gemm_tuner.cli.fleet_sweep import sweep_in_fleet  # noqa: PLC0415 - seldom needed

    sweep_in_fleet(layers, **named)


def _refuse_without_fleet(cpu_classes: list[str] | None) -> None:
    if cpu_classes:
        raise InvalidSetting("--cpu says for which CPUs a fleet tunes; add --scheduler.")


def _refuse_what_is_local(options_given: Mapping[str, bool]) -> None:
    for name, is_given in options_given.items():
        if is_given:
            raise InvalidSetting(f"{name} is for a sweep on this machine; leave out --scheduler.")


def _refuse_what_times(target: str, options_given: Mapping[str, bool]) -> None:
    for name, is_given in options_given.items():
        if is_given:
            raise InvalidSetting(f"--target {target} proves and does not time; leave out {name}.")


def sweep_layers(
    layers: tuple[Layer, ...],
    *,
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    is_quiet: bool,
    later_s: float = 0.0,
    choose: Choose = lambda _problem: (),
) -> SweptLayers:
    """Tune each layer in each context, among the candidates that `choose` names if there are any.

    Each result is printed as it comes, unless `is_quiet`. Where there are several layers, one that
    cannot be swept is kept as a failure. `later_s` is the time that what follows will take.

    Raises:
        GemmTunerError: the only layer cannot be swept.
    """
    swept = SweptLayers()
    with StopOnInterrupt() as interrupt:
        for position, layer in enumerate(layers, start=1):
            if interrupt.is_stopped():
                swept.not_begun.append(layer)
                continue
            label = f"{layer.name} ({position} of {len(layers)})"
            rest_s = (len(layers) - position) * settings.budget_s + later_s
            try:
                with ProgressLine(label, later_s=rest_s) as progress:
                    progress.begin()
                    results = sweep_problem(
                        layer.problem,
                        contexts=layer.contexts_of(contexts),
                        cpu=cpu,
                        repository=repository,
                        settings=settings,
                        on_progress=progress.show,
                        is_stopped=interrupt.is_stopped,
                        chosen=choose(layer.problem),
                    )
            except PreparationStopped:  # while another measured
                swept.not_begun.append(layer)
                continue
            except GemmTunerError as error:
                if len(layers) == 1:
                    raise
                print_message(f"Error: {layer.name} is not swept: {error}")
                swept.failures.append(LayerFailure(layer=layer, error=error))
                continue
            for note in dict.fromkeys(result.note for result in results if result.note):
                print_message(f"Warning: {layer.name}: {note}")
            for result in results:
                swept.found.append((layer, result))
                if not is_quiet:
                    print_result(result, price_of_fixed_order(repository, result.verdict, cpu))
        swept.is_stopped = interrupt.is_stopped()
    return swept


def _print_estimate(
    layers: tuple[Layer, ...],
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    settings: SweepSettings,
    *,
    as_json: bool,
) -> None:
    budget_s = settings.budget_s
    estimates = [
        (layer, estimate(layer.problem, layer.contexts_of(contexts), cpu, budget_s))
        for layer in layers
    ]
    if as_json:
        facts = [
            {
                "name": layer.name,
                "problem": layer.problem.text,
                "candidates": expected.candidates,
                "seconds": expected.seconds,
            }
            for layer, expected in estimates
        ]
        print_json({"cpu": cpu.brand, "layers": facts})
        return
    print_table(
        "Estimate; nothing was run",
        ("layer", "problem", ">candidates", ">longest time"),
        [
            (
                layer.name,
                layer.problem.text,
                str(expected.candidates),
                duration_text(expected.seconds),
            )
            for layer, expected in estimates
        ],
    )
    total_s = sum(expected.seconds for _layer, expected in estimates)
    print_line(f"in all: at most {duration_text(total_s)}")
