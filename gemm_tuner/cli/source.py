"""`gemm-tuner source`: show the C++ behind a kernel, or write what a C program needs to call it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.other_contexts import other_contexts_text
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.provenance import provenance_facts, provenance_lines
from gemm_tuner.cli.terminal.output import print_json, print_message
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.reason import instead_text, speed_text, used_instead, why_not_served
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.resources import templates_dir
from gemm_tuner.select.choose import choose
from gemm_tuner.space.limits import check_covers
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.user_file import user_file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Winner:
    verdict: Verdict
    candidate: Candidate
    source_text: str
    library: bytes


def source(
    m: options.Rows,
    n: options.Columns,
    k: options.Depth,
    *,
    candidate: Annotated[
        str | None, typer.Option("--candidate", help="Text of a candidate; by default the winner")
    ] = None,
    binary: Annotated[
        Path | None,
        typer.Option("--binary", metavar="FILE.so", help="Write the winner's library here instead"),
    ] = None,
    header: Annotated[
        Path | None,
        typer.Option("--header", metavar="FILE.h", help="Write the C header of kernels here"),
    ] = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the C++ of the winner or of any candidate, or write the winner's library."""
    layout = options.with_groups(w_layout, groups)
    problem = Problem.create(
        m,
        n,
        k,
        dtype=dtype,
        w_layout=layout,
        epilogue=epilogue,
        reduction=reduction,
        operation=operation,
    )
    context = options.execution_context(threads, regime)
    if binary is not None and candidate is not None:
        raise InvalidSetting("only a winner has a library; leave out --candidate or --binary.")
    check_place(header, databases=[db])
    check_place(binary, databases=[db], others=[header])
    if header is not None:
        _write(header, (templates_dir() / "abi" / "gemm_tuner.h").read_bytes())
    if binary is not None:
        _write(binary, _winner(problem, context, db).library)
        return
    if candidate is not None:
        chosen = Candidate.parse(candidate)
        family = check_covers(problem, chosen)
        text = render(problem, chosen, family).text
        facts: dict[str, Any] = {}
        lines: tuple[str, ...] = ()
    else:
        winner = _winner(problem, context, db)
        chosen, text = winner.candidate, winner.source_text
        facts, lines = provenance_facts(winner.verdict), provenance_lines(winner.verdict)
    if as_json:
        print_json({"problem": problem.text, "candidate": chosen.text, "source": text, **facts})
    else:
        for line in lines:
            print_message(line)
        typer.echo(text, nl=False)


def _winner(problem: Problem, context: ExecutionContext, db: str | None) -> _Winner:
    problem.check_work()
    repository = Repository(open_database(db, may_create=False))
    cpu = detect_cpu()
    verdict = choose(repository, problem, cpu=cpu, context=context).verdict
    if verdict.artifact is not None and verdict.candidate is not None:
        text = repository.source_text(verdict.artifact.sha256)
        library = repository.binary(verdict.artifact.sha256)
        if text is not None and library is not None:
            return _Winner(
                verdict=verdict, candidate=verdict.candidate, source_text=text, library=library
            )
    otherwise = other_contexts_text(repository, verdict)
    why = f"{otherwise}." if otherwise else _why_not(verdict)
    print_message(f"No kernel for {problem.text}: {why}")
    raise typer.Exit(1)


def _why_not(verdict: Verdict) -> str:
    if verdict.artifact is not None:
        return 'its binary is not in the store any more; "gemm-tuner sweep" builds it again.'
    if verdict.doubt is not None:
        return f'its measurement decides nothing, {verdict.doubt}; run "gemm-tuner sweep" again.'
    if verdict.candidate is not None and (comparison := verdict.comparison):
        return (
            f"the best has {speed_text(comparison.ratio)}{instead_text(comparison)}, so "
            f"{used_instead(comparison)} is to be used; {why_not_served(comparison)}. See its "
            f"source with --candidate {verdict.candidate.text!r}."
        )
    return 'none was tuned; run "gemm-tuner sweep" first, or name a --candidate.'


def _write(path: Path, content: bytes) -> None:
    with user_file(path) as file:
        file.write(content)
    print_message(f"{path} written, {len(content)} bytes.")
