"""`gemm-tuner sweep`: tune one layer, or every layer of a file."""

from typing import Annotated

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli import options
from gemm_tuner.cli.interrupt import StopOnInterrupt
from gemm_tuner.cli.layers import Layer, layers_of
from gemm_tuner.cli.output import (
    ProgressLine,
    duration_text,
    print_json,
    print_line,
    print_message,
    print_table,
)
from gemm_tuner.cli.report import print_result, print_summary, result_facts, summary_facts
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning import sweep as tuning
from gemm_tuner.tuning.sweep import SweepResult, SweepSettings


def sweep(
    m: options.OptionalRows = None,
    n: options.OptionalColumns = None,
    k: options.OptionalDepth = None,
    *,
    shapes: options.Shapes = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    threads: options.Threads = 1,
    regime: options.RegimeChoice = "hot",
    budget: options.Budget = "30s",
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    as_json: options.AsJson = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many candidates and seconds it would take")
    ] = False,
) -> None:
    """Tune a layer, or those of a file, and print the autotuning table.

    What was tried is kept as it happens: Ctrl-C loses nothing, and a second run resumes.
    """
    layers = layers_of(
        m=m, n=n, k=k, shapes=shapes, dtype=dtype, epilogue=epilogue, w_layout=w_layout
    )
    contexts = options.execution_contexts(threads, regime)
    budget_s = options.parse_duration_s(budget)
    settings = SweepSettings(budget_s=budget_s, toolchain=find_toolchain(compiler))
    cpu = detect_cpu()
    if dry_run:
        _print_estimate(layers, contexts, cpu, settings, as_json=as_json)
        return

    found, is_stopped = sweep_layers(
        layers,
        contexts=contexts,
        cpu=cpu,
        repository=Repository(open_database(db)),
        settings=settings,
        is_quiet=as_json,
    )

    verdicts = [result.verdict for _layer, result in found]
    if as_json:
        facts = [result_facts(layer, result) for layer, result in found]
        print_json({"cpu": cpu.brand, "layers": facts, "summary": summary_facts(verdicts)})
    elif len(layers) > 1:
        print_summary(found)
    if is_stopped:
        print_message("Stopped; what was found is kept: run the same command again to resume.")
        raise typer.Exit(1)


def sweep_layers(
    layers: tuple[Layer, ...],
    *,
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    is_quiet: bool,
) -> tuple[list[tuple[Layer, SweepResult]], bool]:
    """Tune each layer in each context, and return the results and whether the user stopped it.

    Each result is printed as it comes, unless `is_quiet`.
    """
    found: list[tuple[Layer, SweepResult]] = []
    with StopOnInterrupt() as interrupt:
        for position, layer in enumerate(layers, start=1):
            with ProgressLine(f"{layer.name} ({position} of {len(layers)})") as progress:
                results = tuning.sweep(
                    layer.problem,
                    contexts=contexts,
                    cpu=cpu,
                    repository=repository,
                    settings=settings,
                    on_progress=progress.show,
                    is_stopped=interrupt.is_stopped,
                )
            for result in results:
                found.append((layer, result))
                if not is_quiet:
                    print_result(result)
            if interrupt.is_stopped():
                break
        return found, interrupt.is_stopped()


def _print_estimate(
    layers: tuple[Layer, ...],
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    settings: SweepSettings,
    *,
    as_json: bool,
) -> None:
    estimates = [
        (layer, tuning.estimate(layer.problem, contexts, cpu, settings)) for layer in layers
    ]
    if as_json:
        facts = [
            {
                "name": layer.name,
                "problem": layer.problem.text,
                "candidates": estimate.candidates,
                "seconds": estimate.seconds,
            }
            for layer, estimate in estimates
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
                str(estimate.candidates),
                duration_text(estimate.seconds),
            )
            for layer, estimate in estimates
        ],
    )
    total_s = sum(estimate.seconds for _layer, estimate in estimates)
    print_line(f"in all: at most {duration_text(total_s)}")
