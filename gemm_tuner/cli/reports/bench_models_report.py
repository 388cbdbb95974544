"""The table of whole models, as text and as JSON facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.facts import ratio_facts
from gemm_tuner.domain.model_run import ModelRun, TimeShares, WayRun
from gemm_tuner.domain.units import counted, time_text

# A share below this of layers that were left says that the profiler does not show them.
_LEAST_SHOWN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMean:
    """The geometric mean of our speed over the fastest other way, over runs measured alike.

    It is of these `models`. `left_out` more have a doubt, and of `failed` more there is no ratio.
    `value` is None where none is left.
    """

    text: str
    value: float | None
    models: tuple[str, ...]
    left_out: int
    failed: int


def ordered(runs: Sequence[ModelRun]) -> list[ModelRun]:
    """Return those first in which we are slower than the best of the others, the slowest first.

    Those without a ratio come last.
    """
    return sorted(runs, key=lambda run: run.ratio.median if run.ratio else float("inf"))


def is_slower(run: ModelRun) -> bool:
    """Say whether another way is faster than ours."""
    return run.ratio is not None and run.ratio.median < 1


def why_slower(run: ModelRun) -> str:
    """Return what can be told of where the time of our way goes."""
    ours, told = run.ours, []
    if ours is None:
        return ""
    if ours.taken is not None and ours.left is not None:
        of = ours.taken + ours.left
        told.append(f"{ours.taken} of {counted(of, 'layer')} taken")
    if ours.shares is not None:
        told.append(_told_shares(ours.shares, ours.left))
    return "; ".join(told)


def _told_shares(shares: TimeShares, layers_left: int | None) -> str:
    rest = max(0.0, 1 - shares.taken)
    if layers_left and shares.left < _LEAST_SHOWN:
        # With `cpp_wrapper`, Inductor calls PyTorch's products past what the profiler sees.
        return (
            f"{shares.taken:.0%} of the time in these, {rest:.0%} in layers left and outside of "
            "layers, which the profiler does not tell apart here"
        )
    return (
        f"{shares.taken:.0%} of the time in these, {shares.left:.0%} in layers left, "
        f"{max(0.0, rest - shares.left):.0%} outside of layers"
    )


def remarks(run: ModelRun) -> str:
    """Return why the numbers of a run may not be believed, or are not what they seem to be."""
    share = run.share_of_limit or 0.0
    over = (
        "over the limit: ours takes less outside of layers than the others, "
        "or reads weights faster than the loop"
    )
    return "; ".join(filter(None, (run.doubt, over if share > 1 else "")))


def means(runs: Sequence[ModelRun]) -> list[ModelMean]:
    """Return a mean for each group of runs that were measured alike, if it has a ratio."""
    groups: dict[tuple[object, ...], list[ModelRun]] = {}
    for run in runs:
        groups.setdefault(run.alike, []).append(run)
    return [_mean(group) for group in groups.values() if any(run.ratio for run in group)]


def _mean(runs: Sequence[ModelRun]) -> ModelMean:
    case = runs[0].case
    ratios = {run.case.model: run.ratio.median for run in runs if run.ratio and not run.doubt}
    threads = counted(case.threads, "thread")
    small = ", small models" if case.is_small else ""
    return ModelMean(
        text=f"{case.dtype}, {threads}, batch {case.batch}{small}",
        value=geometric_mean(ratios.values()) if ratios else None,
        models=tuple(ratios),
        left_out=sum(run.doubt is not None for run in runs),
        failed=sum(run.ratio is None for run in runs),
    )


def mean_text(mean: ModelMean) -> str:
    """Return a mean as a line to read."""
    left_out = f"; {mean.left_out} left out: not believed" if mean.left_out else ""
    failed = f"; {mean.failed} left out: ours or all others failed" if mean.failed else ""
    value = (
        "none is left"
        if mean.value is None
        else f"{mean.value:.3f} times the speed of the best of the others"
    )
    models = f"{counted(len(mean.models), 'model')}: " if len(mean.models) > 1 else ""
    named = f"{models}{', '.join(mean.models)}" if mean.models else "no model"
    return f"geometric mean, {mean.text}: {value} ({named}{left_out}{failed})"


def time_cell(one: WayRun) -> str:
    """Return the time of a way, empty where it is no result."""
    return time_text(one.timing.median_ns) if one.is_result else ""


def reasons(runs: Sequence[ModelRun]) -> dict[str, list[str]]:
    """Return why ways are no result, each reason once, with the cases that it is of."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for one in run.ways:
            if one.reason:
                found.setdefault(f"{one.way}: {one.reason}", []).append(run.case.text)
    return found


def cases_text(cases: Sequence[str], among: int) -> str:
    """Return which cases a reason is of."""
    return "all" if len(cases) == among else "; ".join(cases)


def print_runs(runs: Sequence[ModelRun]) -> None:
    """Print the table, the reasons why ways are no result, and the means."""
    names = list(dict.fromkeys(one.way for run in runs for one in run.ways))
    print_table(
        "Time of a call; the speed of the fastest of our ways over the best of the others",
        ("case", *(f">{name}" for name in names), ">speed", "over", ">of limit", "why"),
        [_row(run, names) for run in ordered(runs)],
    )
    for reason, cases in reasons(runs).items():
        print_line(f"{reason} ({cases_text(cases, len(runs))})")
    for mean in means(runs):
        print_line(mean_text(mean))


def _row(run: ModelRun, names: Sequence[str]) -> tuple[str, ...]:
    by_name = {one.way: one for one in run.ways}
    share, ratio = run.share_of_limit, run.ratio
    return (
        run.case.text,
        *(time_cell(by_name[name]) if name in by_name else "" for name in names),
        f"{ratio.median:.3f}" if ratio else "",
        run.rival.way if run.rival else "",
        f"{share:.0%}" if share else "",
        remarks(run) or (why_slower(run) if is_slower(run) else ""),
    )


def facts_of(runs: Sequence[ModelRun]) -> dict[str, Any]:
    """Return the same as JSON facts."""
    return {
        "models": [_facts(run) for run in ordered(runs)],
        "means": [
            {
                "of": mean.text,
                "geometric_mean": mean.value,
                "models": mean.models,
                "left_out": mean.left_out,
                "failed": mean.failed,
            }
            for mean in means(runs)
        ],
    }


def _facts(run: ModelRun) -> dict[str, Any]:
    limit, case, conditions = run.limit, run.case, run.conditions
    return {
        "model": case.model,
        "dtype": case.dtype,
        "threads": case.threads,
        "batch": case.batch,
        "is_small": case.is_small,
        "ours": run.ours.way if run.ours else None,
        "rival": run.rival.way if run.rival else None,
        "ratio": ratio_facts(run.ratio) if run.ratio else None,
        "doubt": run.doubt,
        "limit_ns": limit.seconds * 1e9 if limit else None,
        "share_of_limit": run.share_of_limit,
        "why_no_limit": run.why_no_limit or None,
        "cpu": conditions.cpu,
        "measured_at": conditions.measured_at,
        "generator": conditions.generator,
        "built_with": conditions.built_with or None,
        "ways": [
            {
                "way": one.way,
                "package": one.package or None,
                "median_ns": one.timing.median_ns if one.is_result else None,
                "error": one.error,
                "agreement": one.agreement,
                "taken": one.taken,
                "left": one.left,
                "why_left": list(one.why_left),
                "share_taken": one.shares.taken if one.shares else None,
                "share_left": one.shares.left if one.shares else None,
                "reason": one.reason or None,
            }
            for one in run.ways
        ],
    }
