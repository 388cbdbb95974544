"""`gemm-tuner resolve`: ask a service, or the local database, which kernel to use."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.other_contexts import other_contexts_text
from gemm_tuner.cli.reports.verdict_text import decision_text
from gemm_tuner.cli.terminal.output import print_json, print_line
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.select.price import price_of_fixed_order
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.payload import SignedArtifact, VerdictPayload


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
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the verdict for a layer; exit 1 if no kernel is served."""
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
    problem.check_work()
    context = options.execution_context(threads, regime)
    if url is not None:
        is_served = _from_service(url, problem, context, as_json=as_json)
    else:
        is_served = _from_database(db, problem, context, as_json=as_json)
    if not is_served:
        raise typer.Exit(1)


def _from_database(
    db: str | None, problem: Problem, context: ExecutionContext, *, as_json: bool
) -> bool:
    """Print the answer of the database, and return whether it names a kernel."""
    repository, cpu = Repository(open_database(db, may_create=False)), detect_cpu()
    match = choose(repository, problem, cpu=cpu, context=context)
    verdict = match.verdict
    if as_json:
        now = datetime.now(UTC)
        payload = VerdictPayload.of(verdict, issued_at=now, expires_at=now, serial=0)
        print_json(_facts(payload, match.explain))
        return verdict.artifact is not None
    otherwise = other_contexts_text(repository, verdict)
    print_line("; ".join(filter(None, (decision_text(verdict), otherwise))))
    price = price_of_fixed_order(repository, verdict, cpu)
    if price is not None:
        print_line(price.text)
    _print_kernel(verdict.candidate.text if verdict.candidate else None, verdict.artifact)
    return verdict.artifact is not None


def _from_service(url: str, problem: Problem, context: ExecutionContext, *, as_json: bool) -> bool:
    """Print the answer of the service, and return whether it names a kernel."""
    from gemm_tuner.client.client import Client  # noqa: PLC0415 - a tenth of a second to load

    resolution = Client(url).resolve(problem, threads=context.threads, regime=context.regime)
    verdict = resolution.verdict
    if as_json:
        print_json(_facts(verdict, resolution.explain))
        return verdict.artifact is not None
    for step in resolution.explain:
        print_line(f"- {step}")
    print_line(f"{verdict.decision.value}, {verdict.basis.text}")
    _print_kernel(verdict.candidate, verdict.artifact)
    return verdict.artifact is not None


def _print_kernel(candidate: str | None, artifact: Artifact | SignedArtifact | None) -> None:
    if artifact is not None:
        print_line(f"kernel: {candidate}")
        print_line(f"artifact: sha256 {artifact.sha256}")
    elif candidate is not None:
        print_line(f"best candidate, not served: {candidate}")


def _facts(verdict: VerdictPayload, explain: Sequence[str]) -> dict[str, Any]:
    """Return a verdict as JSON facts, without what belongs to its signature."""
    facts = verdict.model_dump(mode="json", exclude={"issued_at", "expires_at", "serial"})
    return {**facts, "explain": list(explain)}
