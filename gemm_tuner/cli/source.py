"""`gemm-tuner source`: show the C++ behind a kernel."""

from typing import Annotated

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_json, print_message
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository


def source(
    m: options.Rows,
    n: options.Columns,
    k: options.Depth,
    *,
    candidate: Annotated[
        str | None, typer.Option("--candidate", help="Text of a candidate; by default the winner")
    ] = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the generated source of the winner, or of any candidate."""
    problem = Problem.create(m, n, k, dtype=dtype, w_layout=w_layout, epilogue=epilogue)
    if candidate is not None:
        chosen = Candidate.parse(candidate)
        text: str | None = render(problem, chosen, family_named(chosen.micro_kernel.family)).text
    else:
        context = options.execution_context(threads, regime)
        repository = Repository(open_database(db))
        verdict = choose(repository, problem, cpu=detect_cpu(), context=context).verdict
        artifact = verdict.artifact
        text = repository.source_text(artifact.sha256) if artifact else None
        if text is None or verdict.candidate is None:
            print_message(
                f"No kernel is stored for {problem.text}; "
                'run "gemm-tuner sweep" first, or name a --candidate.'
            )
            raise typer.Exit(1)
        chosen = verdict.candidate
    if as_json:
        print_json({"problem": problem.text, "candidate": chosen.text, "source": text})
    else:
        typer.echo(text, nl=False)
