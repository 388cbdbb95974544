"""`gemm-tuner resolve`: ask a service, or the local database, which kernel to use."""

from typing import Annotated, Any

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_json, print_line
from gemm_tuner.cli.report import decision_text, verdict_facts
from gemm_tuner.client.client import Client
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.payload import VerdictPayload


def resolve(
    m: options.Rows,
    n: options.Columns,
    k: options.Depth,
    *,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask this service instead of the database")
    ] = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the verdict for a layer; exit with 1 if no kernel is to be used."""
    problem = Problem.create(m, n, k, dtype=dtype, w_layout=w_layout, epilogue=epilogue)
    context = options.execution_context(threads, regime)
    if url is not None:
        decision = _from_service(url, problem, context, as_json=as_json)
    else:
        repository = Repository(open_database(db))
        verdict = choose(repository, problem, cpu=detect_cpu(), context=context).verdict
        decision = verdict.decision
        if as_json:
            print_json(verdict_facts(verdict))
        else:
            print_line(decision_text(verdict))
            if verdict.candidate is not None:
                print_line(f"kernel: {verdict.candidate.text}")
            if verdict.artifact is not None:
                print_line(f"artifact: sha256 {verdict.artifact.sha256}")
    if decision is Decision.BASELINE:
        raise typer.Exit(1)


def _from_service(
    url: str, problem: Problem, context: ExecutionContext, *, as_json: bool
) -> Decision:
    resolution = Client(url).resolve(problem, threads=context.threads, regime=context.regime)
    verdict = resolution.verdict
    if as_json:
        print_json({**_payload_facts(verdict), "explain": list(resolution.explain)})
        return verdict.decision
    for step in resolution.explain:
        print_line(f"- {step}")
    print_line(f"{verdict.decision.value}, basis {verdict.basis.value}")
    if verdict.candidate is not None:
        print_line(f"kernel: {verdict.candidate}")
    if verdict.artifact is not None:
        print_line(f"artifact: sha256 {verdict.artifact.sha256}")
    return verdict.decision


def _payload_facts(verdict: VerdictPayload) -> dict[str, Any]:
    facts: dict[str, Any] = verdict.model_dump(mode="json")
    return facts
