"""`gemm-tuner explain`: say why a problem gets the kernel it gets."""

from textwrap import indent

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.other_contexts import other_contexts_text
from gemm_tuner.cli.reports.conditions import conditions_facts, conditions_lines, trial_behind
from gemm_tuner.cli.reports.provenance import provenance_facts, provenance_lines
from gemm_tuner.cli.reports.range_report import (
    curve_facts,
    kernel_facts,
    print_curve,
    print_kernels,
)
from gemm_tuner.cli.reports.sweep_report import price_facts, verdict_facts
from gemm_tuner.cli.terminal.output import print_json, print_line
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.select.measured_range import measured_range
from gemm_tuner.select.price import price_of_fixed_order
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def explain(
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
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print each step of the lookup for a layer, and the evidence for it."""
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
    cpu = detect_cpu()
    repository = Repository(open_database(db, may_create=False))
    match = choose(repository, problem, cpu=cpu, context=context)
    tried = repository.trials(problem=problem, cpu_key=cpu.exact_key)
    price = price_of_fixed_order(repository, match.verdict, cpu)
    behind = trial_behind(match.verdict, tried)
    candidate = match.verdict.candidate
    several = candidate if candidate and candidate.below else None
    curve = (
        measured_range(repository, behind.artifact.sha256, problem, cpu=cpu, context=context)
        if several and behind and behind.artifact
        else ()
    )
    failures = [trial for trial in tried if trial.outcome is not Outcome.CORRECT]
    outcomes: dict[str, int] = {}
    for trial in [trial for trial in tried if trial.context == context]:
        outcome = trial.outcome.value + (" by emulation" if trial.emulated else "")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    if as_json:
        facts = {
            **provenance_facts(match.verdict),
            **price_facts(match.verdict, price),
            "explain": list(match.explain),
            "conditions": conditions_facts(behind),
            "kernels": kernel_facts(problem, several) if several else [],
            **curve_facts(curve),
            "trials": outcomes,
            "failures": [
                {
                    "candidate": trial.candidate.text,
                    "outcome": trial.outcome.value,
                    "detail": trial.detail,
                }
                for trial in failures
            ],
        }
        print_json({**verdict_facts(match.verdict), **facts})
        return
    if several:
        print_kernels(problem, several)
    if curve:
        print_curve(problem, curve)
    for step in match.explain:
        print_line(f"- {step}")
    if price is not None:
        print_line(f"- {price.text}.")
    for line in (*provenance_lines(match.verdict), *conditions_lines(behind)):
        print_line(line)
    otherwise = other_contexts_text(repository, match.verdict)
    if otherwise:
        print_line(f"- {otherwise}.")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "none"
    print_line(f"trials here: {counts}")
    for trial in failures:
        print_line(f"{trial.outcome.value}: {trial.candidate.text}")
        print_line(indent(trial.detail, "    "))
