"""`gemm-tuner verify`: prove one candidate, also for a CPU that this one is not."""

from typing import Annotated

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_line
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.prove import prove


def verify(
    m: options.Rows,
    n: options.Columns,
    k: options.Depth,
    *,
    candidate: Annotated[str, typer.Option("--candidate", help="Text of the candidate")],
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    compiler: options.Compiler = None,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Prove one candidate and record the outcome, without timing it.

    AMX and AVX512-FP16 are emulated where the CPU lacks them. The exit code is 1 if the candidate
    fails.
    """
    layout = options.with_groups(w_layout, groups)
    trial = prove(
        Problem.create(
            m,
            n,
            k,
            dtype=dtype,
            w_layout=layout,
            epilogue=epilogue,
            reduction=reduction,
            operation=operation,
        ),
        Candidate.parse(candidate),
        cpu=detect_cpu(),
        repository=Repository(open_database(db)),
        toolchain=find_toolchain(compiler),
    )
    if as_json:
        print_json(_facts(trial))
    else:
        _print(trial)
    if trial.outcome is not Outcome.CORRECT:
        raise typer.Exit(1)


def _facts(trial: Trial) -> dict[str, object]:
    return {
        "problem": trial.problem.text,
        "candidate": trial.candidate.text,
        "toolchain": trial.toolchain,
        "outcome": trial.outcome.value,
        "detail": trial.detail,
        "emulated": sorted(trial.emulated),
        "artifact": trial.artifact.sha256 if trial.artifact else None,
    }


def _print(trial: Trial) -> None:
    print_line(f"{trial.problem.text}: {trial.outcome.value}: {trial.candidate.text}")
    if trial.emulated:
        print_line(f"emulated, because this CPU lacks it: {isa_text(trial.emulated)}")
    if trial.detail:
        print_line(trial.detail)
