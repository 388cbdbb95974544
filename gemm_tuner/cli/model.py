"""`gemm-tuner model`: how well the model ranks candidates on a CPU of the store."""

from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.model_record import record_command
from gemm_tuner.cli.model_train import train_command
from gemm_tuner.cli.terminal.output import print_json, print_line, print_table
from gemm_tuner.domain.units import context_text, counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.model_quality import TOP, RankedProblem, model_quality
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

model = typer.Typer(
    help="Check the model that ranks candidates, and record and train for it", no_args_is_help=False
)
model.command(
    "record", help="Time a grid of candidates of each layer, and keep every sample for replays"
)(record_command)
model.command("train", help="Train a ranker of candidates on recorded trials, by scikit-learn")(
    train_command
)

_HEADERS = ("problem", "context", ">timed", ">rank", ">regret", "the model's first", "the best")


@model.command("report", help="Compare the model's order with what was measured on a CPU")
def report_command(
    *,
    cpu_key: Annotated[
        str | None,
        typer.Option("--cpu", metavar="KEY", help="The key of a CPU in the store; by default this"),
    ] = None,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare the model's order with what was measured on a CPU, by default this one."""
    repository = Repository(open_database(db, may_create=False))
    cpu = detect_cpu() if cpu_key is None else repository.cpu(cpu_key)
    if cpu is None:
        raise InvalidSetting(
            f"the store knows no CPU with the key {cpu_key!r}; import its records, or take a key "
            'that "gemm-tuner cpu" prints there.'
        )
    problems = model_quality(repository, cpu)
    if not problems.problems:
        raise InvalidSetting(
            f'nothing was measured on {cpu.exact_key}; run "gemm-tuner sweep" first, or name '
            "another store with --db."
        )
    if as_json:
        print_json(
            {
                "cpu": cpu.exact_key,
                "share_in_top": problems.share_in_top,
                "top": TOP,
                "median_regret": problems.median_regret,
                "problems": [_facts(one) for one in problems.problems],
            }
        )
        return
    worst = sorted(problems.problems, key=lambda one: -one.regret)
    missed = [one for one in worst if not one.is_in_top or one.regret > problems.median_regret]
    print_table("Where the model is furthest off", _HEADERS, [_row(one) for one in missed])
    print_line(
        f"\n{counted(len(problems.problems), 'problem')} on {cpu.brand} ({cpu.exact_key}): the "
        f"true best is in the model's top {TOP} of all candidates for "
        f"{problems.share_in_top:.0%} of them, and the regret of its first choice is "
        f"{problems.median_regret:.1%} (median). The order is "
        "each tile with its first blocking, then all others; one as fast as the best counts as it."
    )


def _row(one: RankedProblem) -> tuple[str, ...]:
    return (
        one.problem.text,
        context_text(one.context),
        str(one.timed),
        str(one.rank or "-"),
        f"{one.regret:.1%}",
        one.first.text,
        one.best.text,
    )


def _facts(one: RankedProblem) -> dict[str, object]:
    return {
        "problem": one.problem.text,
        "threads": one.context.threads,
        "regime": one.context.regime.value,
        "timed": one.timed,
        "rank": one.rank,
        "regret": one.regret,
        "first": one.first.text,
        "best": one.best.text,
    }
