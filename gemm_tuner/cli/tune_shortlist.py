"""`gemm-tuner tune-shortlist`: time what was chosen for this kind of CPU elsewhere."""

from collections.abc import Sequence

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import layers_of
from gemm_tuner.cli.reports.sweep_report import failure_facts, print_summary, result_facts
from gemm_tuner.cli.sweep import sweep_layers
from gemm_tuner.cli.terminal.output import print_json, print_message
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.predicted import shortlisted
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.shortlist import SHORTLIST


def tune_shortlist(
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
    budget: options.Budget = "10s",
    again: options.Again = False,
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    as_json: options.AsJson = False,
) -> None:
    """Time the kernels chosen for this kind of CPU, and serve the best of them.

    They come from `gemm-tuner sweep --target`, also by `gemm-tuner records import`; where nobody
    chose any, the model does. A sweep finds more, and takes longer.
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
    check_cpus(threads)
    cpu, repository = detect_cpu(), Repository(open_database(db))

    def choose(problem: Problem) -> Sequence[Candidate]:
        trials = shortlisted(repository, problem, cpu=cpu, threads=threads, origin=None)
        space = Space(problem=problem, cpu=cpu, threads=threads)
        return [trial.candidate for trial in trials] or shortlist(space, SHORTLIST)

    swept = sweep_layers(
        layers,
        contexts=contexts,
        cpu=cpu,
        repository=repository,
        settings=SweepSettings(
            budget_s=options.parse_duration_s(budget),
            toolchain=find_toolchain(compiler),
            again=again,
        ),
        is_quiet=as_json,
        choose=choose,
    )
    if as_json:
        print_json(
            {
                "cpu": cpu.brand,
                "layers": [result_facts(layer, result) for layer, result in swept.found],
                "failures": [failure_facts(failure) for failure in swept.failures],
                "not_begun": [layer.name for layer in swept.not_begun],
            }
        )
    elif len(layers) > 1:
        print_summary(swept.found, swept.failures, swept.not_begun)
    if swept.is_stopped:
        print_message("Stopped; what was found is kept: run the same command again.")
    if swept.is_stopped or swept.failures:
        raise typer.Exit(1)
