"""What was adopted, as JSON facts and as tables for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports.sweep_report import result_facts, verdict_facts
from gemm_tuner.cli.terminal.output import print_line, print_table, results
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.facts import ratio_facts
from gemm_tuner.domain.units import context_text, counted, duration_text
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.select.recorded import Recorded
from gemm_tuner.tuning.adopt import Adopted, Planned, expected_s
from gemm_tuner.tuning.settings import SweepSettings

_TABLE_WIDTH = 80

Plans = Sequence[tuple[Layer, Sequence[Planned]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedLayer:
    """What came of a layer in one context."""

    layer: Layer
    adopted: Adopted


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftLayer:
    """A layer for which nothing was done in one context: it is up to date, or nothing is known."""

    layer: Layer
    planned: Planned


def print_adopted(
    adopted: Sequence[AdoptedLayer], left: Sequence[LeftLayer], cpu: Cpu, *, is_renewal: bool
) -> None:
    """Print a row for each layer and context, and which verdicts changed."""
    if adopted:
        _print_rows(
            "Adopted: proved and timed here",
            ("layer", "problem", "decision", "ratio, 95 % interval", ">time", "record"),
            [_row(one) for one in adopted],
        )
        # A problem has one time, whatever its contexts.
        times = {
            (one.layer.problem, one.adopted.planned.context.threads): one.adopted.took_s
            for one in adopted
        }
        plural = "" if len(times) == 1 else "s"
        print_line(
            f"{len(times)} problem{plural}, {_seconds_text(median(times.values()))} in the median, "
            "all contexts of a problem together"
        )
    for one in adopted:
        if doubt := one.adopted.result.verdict.doubt:
            print_line(
                f"{one.layer.name}, {context_text(one.adopted.planned.context)}, is not believed, "
                f"and measured anew by the next run: {doubt}"
            )
    _print_changes(adopted)
    _print_left(left, cpu)
    if is_renewal and not (adopted or left):
        print_line(
            "nothing in this database was timed on this CPU; give M N K or --shapes FILE, or tune "
            "with gemm-tuner sweep"
        )


def print_plan(planned: Plans, cpu: Cpu, settings: SweepSettings) -> None:
    """Print what would be timed, why, and about how long it would take."""
    rows: list[tuple[str, ...]] = []
    total_s = 0.0
    for layer, contexts in planned:
        to_do = [one for one in contexts if one.winners.winners and not one.is_current]
        total_s += expected_s(layer.problem, to_do, cpu, settings)
        rows += [
            (
                layer.name,
                f"{layer.problem.text}, {context_text(one.context)}",
                str(len(one.winners.winners)) if one in to_do else "-",
                one.why or "up to date",
                _source_text(one.winners.winners[0]) if one.winners.winners else "none",
            )
            for one in contexts
        ]
    _print_rows(
        "Plan; nothing was run",
        ("layer", "problem", ">kernels", "why", "first record"),
        rows,
    )
    if total_s > 0:
        print_line(f"in all: about {duration_text(total_s)}")
    _print_left(
        [
            LeftLayer(layer=layer, planned=one)
            for layer, contexts in planned
            for one in contexts
            if not one.winners.winners and not one.is_current
        ],
        cpu,
    )


def plan_facts(planned: Plans, cpu: Cpu, settings: SweepSettings) -> list[dict[str, Any]]:
    """Return what would be timed, as JSON facts."""
    return [
        {
            "name": layer.name,
            "problem": layer.problem.text,
            "seconds": expected_s(
                layer.problem,
                [one for one in contexts if one.winners.winners and not one.is_current],
                cpu,
                settings,
            ),
            "contexts": [
                {
                    "threads": one.context.threads,
                    "regime": one.context.regime.value,
                    "why": one.why,
                    "is_current": one.is_current,
                    "records": [_record_facts(each) for each in one.winners.winners],
                    "left_out": list(one.winners.left_out),
                }
                for one in contexts
            ],
        }
        for layer, contexts in planned
    ]


def adopted_facts(adopted: Sequence[AdoptedLayer], left: Sequence[LeftLayer]) -> dict[str, Any]:
    """Return what was adopted, what is up to date and what is not known, as JSON facts."""
    return {
        "layers": [
            {
                **result_facts(one.layer, one.adopted.result),
                "why": one.adopted.planned.why,
                "took_s": one.adopted.took_s,
                "record": _record_facts(one.adopted.record) if one.adopted.record else None,
                "is_changed": one.adopted.is_changed,
                "before": verdict_facts(one.adopted.planned.before),
                "now": verdict_facts(one.adopted.now),
            }
            for one in adopted
        ],
        "current": [_left_facts(one) for one in left if one.planned.is_current],
        "nothing_recorded": [_left_facts(one) for one in left if not one.planned.is_current],
    }


def _print_changes(adopted: Sequence[AdoptedLayer]) -> None:
    """Print which verdicts of before are others now."""
    known = [one for one in adopted if one.adopted.planned.is_known]
    changed = [one for one in known if one.adopted.is_changed]
    if changed:
        _print_rows(
            f"Changed verdicts, {len(changed)} of {len(known)} that were measured before",
            ("problem", "before", "now", "why it was measured"),
            [
                (
                    f"{one.layer.problem.text}, {context_text(one.adopted.planned.context)}",
                    _verdict_text(one.adopted.planned.before),
                    _verdict_text(one.adopted.now),
                    one.adopted.planned.why,
                )
                for one in changed
            ],
        )
    elif known:
        print_line(f"none of {counted(len(known), 'verdict')} from before changed")


def _print_left(left: Sequence[LeftLayer], cpu: Cpu) -> None:
    current = sum(one.planned.is_current for one in left)
    if current:
        verb = "verdict is" if current == 1 else "verdicts are"
        print_line(f"{current} {verb} up to date; --again measures anew")
    for one in left:
        if not one.planned.is_current:
            print_line(
                f"{one.layer.name}, {context_text(one.planned.context)}: nothing that can run here "
                f"is recorded of {one.layer.problem.text} on the model {cpu.model_key}; "
                "gemm-tuner sweep tunes it"
            )


def _print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, or on a narrow terminal, which would cut its words, a line for each cell."""
    if not results().is_terminal or results().width >= _TABLE_WIDTH:
        print_table(title, columns, rows)
        return
    print_line(title)
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            print_line(f"  {column.lstrip('>')}: {cell}")
        print_line("")


def _row(one: AdoptedLayer) -> tuple[str, ...]:
    adopted, result = one.adopted, one.adopted.result
    verdict = result.verdict
    ratio = verdict.ratio
    if result.is_interrupted and ratio is None:
        decision = "interrupted"
    elif ratio is None:
        decision = "no kernel was confirmed"
    else:
        served = "served" if adopted.now.artifact is not None else "not served"
        doubted = ", not believed" if verdict.doubt else ""
        decision = f"{verdict.decision.value}, {served}{doubted}"
    return (
        one.layer.name,
        f"{one.layer.problem.text}, {context_text(adopted.planned.context)}",
        decision,
        f"{ratio.median:.3f}, {ratio.low:.3f} to {ratio.high:.3f}" if ratio else "-",
        _seconds_text(adopted.took_s),
        _source_text(adopted.record) if adopted.record else "-" if ratio is None else "timed here",
    )


def _source_text(record: Recorded) -> str:
    trial = record.trial
    return f"{record.source}, {trial.created_at.date()}"


def _verdict_text(verdict: Verdict) -> str:
    name = verdict.candidate.text if verdict.candidate else "no kernel"
    served = "" if verdict.artifact else ", not served"
    return f"{verdict.decision.value}: {name}{served}"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration_text(seconds)


def _record_facts(record: Recorded) -> dict[str, Any]:
    """Return a record as JSON facts; its ratio was measured there, beside what it names."""
    trial = record.trial
    measured = trial.measurement
    return {
        "source": record.source,
        "candidate": trial.candidate.text,
        "cpu_key": trial.cpu.exact_key,
        "date": trial.created_at.date().isoformat(),
        "generator": trial.generator,
        "toolchain": trial.toolchain,
        "stage": trial.stage.value,
        "baseline": measured.baseline if measured else None,
        "ratio": ratio_facts(measured.ratio) if measured else None,
    }


def _left_facts(one: LeftLayer) -> dict[str, Any]:
    return {
        "name": one.layer.name,
        "problem": one.layer.problem.text,
        "threads": one.planned.context.threads,
        "regime": one.planned.context.regime.value,
    }
