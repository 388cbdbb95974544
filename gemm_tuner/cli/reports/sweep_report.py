"""The results of a sweep, as JSON facts and as tables for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports.means import Mean, geometric_means
from gemm_tuner.cli.reports.verdict_text import decision_text
from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.doubt import DISTURBED, kind_of_doubt
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.facts import artifact_facts, ratio_facts
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.units import context_text, counted, duration_text, time_text
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.select.price import Price
from gemm_tuner.tuning.result import Recalled, SweepResult

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFailure:
    """A layer that could not be swept, and why."""

    layer: Layer
    error: GemmTunerError


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalistRow:
    """A row of the autotuning table, whose rows were timed in the same rounds."""

    name: str
    median_ns: float
    role: str


def recalled_text(recalled: Recalled) -> str:
    """Return why nothing was measured, and what to do for it."""
    if recalled.end.is_exhausted:
        return (
            f"tuned before, on {recalled.on}, to the end of its search, so nothing was measured; "
            "--again measures anew"
        )
    budget = duration_text(recalled.end.budget_s)
    return (
        f"tuned before, on {recalled.on}, with a budget of {budget}, so nothing was measured; "
        f"--again measures anew, --budget above {budget} goes on"
    )


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON facts."""
    return {
        "problem": verdict.problem.text,
        "cpu_key": verdict.cpu_key,
        "threads": verdict.context.threads,
        "regime": verdict.context.regime.value,
        "decision": verdict.decision.value,
        "basis": verdict.basis.value,
        "complete": verdict.complete,
        "candidate": verdict.candidate.text if verdict.candidate else None,
        "artifact": artifact_facts(verdict.artifact) if verdict.artifact else None,
        "ratio": ratio_facts(verdict.ratio) if verdict.ratio else None,
        "instead": _instead_facts(verdict.comparison),
        "doubt": verdict.doubt,
    }


def _instead_facts(comparison: Comparison | None) -> dict[str, Any] | None:
    """Return what runs where no kernel is served, and the speed of the kernel over it."""
    if comparison is None or comparison.instead is None:
        return None
    library = comparison.instead.library
    return {
        "library": library.text,
        "package": library.package,
        "ratio": ratio_facts(comparison.beside_instead),
    }


def price_facts(verdict: Verdict, price: Price | None) -> dict[str, Any]:
    """Return what a fixed order of additions costs, as JSON facts; nothing for other problems."""
    if not verdict.problem.is_fixed:
        return {}
    facts = price and {
        "speed_ratio": price.speed,
        "candidate": price.candidate.text,
        "baseline": price.baseline,
    }
    return {"beside_any_order": facts}


def result_facts(layer: Layer, result: SweepResult, price: Price | None = None) -> dict[str, Any]:
    """Return the results of a sweep for one layer in one context, as JSON facts."""
    rows = _finalist_rows(result)
    return {
        "name": layer.name,
        **verdict_facts(result.verdict),
        **price_facts(result.verdict, price),
        "finalists": [
            {
                "name": row.name,
                "median_ns": row.median_ns,
                "share_of_best": rows[0].median_ns / row.median_ns,
                "role": row.role,
            }
            for row in rows
        ],
        "tried": result.tried,
        "failed": result.failed,
        "resumed": result.resumed,
        "interrupted": result.is_interrupted,
        "recalled": _recalled_facts(result.recalled),
        "note": result.note,
        "raced_on": result.raced_on,
    }


def print_result(result: SweepResult, price: Price | None = None) -> None:
    """Print the autotuning table of one layer in one context, and the decision."""
    verdict = result.verdict
    rows = _finalist_rows(result)
    if rows:
        print_table(
            f"{verdict.problem.text}, {context_text(verdict.context)}",
            ("candidate", ">time per call", ">share of best", "role"),
            [
                (
                    row.name,
                    time_text(row.median_ns),
                    f"{rows[0].median_ns / row.median_ns:.1%}",
                    row.role,
                )
                for row in rows
            ],
        )
    measurement = verdict.measurement
    if measurement is not None and all(
        trial.measurement is None or Evidence.of(trial.measurement) != measurement
        for trial in result.together
    ):
        count = len(measurement.process_ratios)
        print_line(
            f"confirmed in {'rounds of its own' if count == 1 else f'{count} processes'}: "
            f"{time_text(measurement.candidate_median_ns)} beside "
            f"{time_text(measurement.baseline_median_ns)} of {measurement.baseline}"
        )
    if _is_open(result):
        print_line(f"{INTERRUPTED}: no kernel is confirmed yet; sweep again to go on")
    else:
        print_line(decision_text(verdict))
    if price is not None:
        print_line(price.text)
    if result.recalled is not None:
        print_line(recalled_text(result.recalled))
    if result.raced_on:
        print_line(f"candidates raced as {result.raced_on}, finalists on the whole problem")
    print_line(f"{counted(result.tried, 'candidate')} tried, {result.failed} failed\n")


def failure_facts(failure: LayerFailure) -> dict[str, Any]:
    """Return a layer that could not be swept, as JSON facts."""
    layer = failure.layer
    return {"name": layer.name, "problem": layer.problem.text, "error": str(failure.error)}


def print_summary(
    found: Sequence[tuple[Layer, SweepResult]],
    failures: Sequence[LayerFailure],
    not_begun: Sequence[Layer] = (),
) -> None:
    """Print one row per layer and context, those without any, and the means of the ratios."""
    print_table(
        "Summary",
        ("layer", "problem", "context", ">kernel", ">baseline", ">ratio", "decision"),
        [
            (
                layer.name,
                result.verdict.problem.text,
                context_text(result.verdict.context),
                *_measurement_cells(result.verdict.measurement),
                _state_text(result),
            )
            for layer, result in found
        ]
        + [
            (layer.name, layer.problem.text, "-", "-", "-", "-", state)
            for layer, state in (
                *((failure.layer, "not swept") for failure in failures),
                *((layer, "not begun") for layer in not_begun),
            )
        ],
    )
    for mean in means_of([result.verdict for _layer, result in found]):
        print_line(mean.text)
    disturbed = sum(_kind_of_doubt(result) == DISTURBED for _layer, result in found)
    if disturbed:
        print_line(
            f"{counted(disturbed, 'measurement')} disturbed by other work, which decides nothing: "
            'sweep again on an idle machine; "gemm-tuner doctor" says what keeps it busy'
        )


def means_of(verdicts: Sequence[Verdict]) -> list[Mean]:
    """Return the geometric mean of the kernels' speeds for each context and baseline."""
    return geometric_means(
        (verdict.context, verdict.measurement.baseline, verdict.measurement)
        for verdict in verdicts
        if verdict.measurement is not None
    )


def summary_facts(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the geometric means as JSON facts."""
    return [mean.facts() for mean in means_of(verdicts)]


def _recalled_facts(recalled: Recalled | None) -> dict[str, Any] | None:
    if recalled is None:
        return None
    end = recalled.end
    return {
        "date": recalled.on.isoformat(),
        "budget_s": end.budget_s,
        "exhausted": end.is_exhausted,
    }


def _is_open(result: SweepResult) -> bool:
    """Return whether a sweep was interrupted before anything was known."""
    return result.is_interrupted and result.verdict.measurement is None


def _state_text(result: SweepResult) -> str:
    """Return the decision, and what kept the sweep from one; there may be none yet."""
    if _is_open(result):
        return INTERRUPTED
    words = [result.verdict.decision.value]
    if kind := _kind_of_doubt(result):
        words.append(kind)
    if result.is_interrupted:
        words.append(INTERRUPTED)
    return ", ".join(words)


def _kind_of_doubt(result: SweepResult) -> str | None:
    doubt = result.verdict.doubt
    return kind_of_doubt(doubt) if doubt else None


def _measurement_cells(measurement: Evidence | None) -> tuple[str, str, str]:
    if measurement is None:
        return ("-", "-", "-")
    return (
        time_text(measurement.candidate_median_ns),
        time_text(measurement.baseline_median_ns),
        f"{measurement.ratio.median:.3f}",
    )


def _finalist_rows(result: SweepResult) -> list[_FinalistRow]:
    """Return the timings of the final's rounds, fastest first, the baseline among them."""
    measured = [
        (trial, trial.measurement) for trial in result.together if trial.measurement is not None
    ]
    rows = [
        _FinalistRow(
            name=trial.candidate.text,
            median_ns=measurement.candidate.median_ns,
            role=_role(trial, result.verdict),
        )
        for trial, measurement in measured
    ]
    if measured:
        # Who left the final early has fewer samples of the baseline beside him.
        beside = max(
            (measurement for _trial, measurement in measured),
            key=lambda measurement: len(measurement.baseline_timing.samples_ns),
        )
        rows.append(
            _FinalistRow(
                name=beside.baseline,
                median_ns=beside.baseline_timing.median_ns,
                role="baseline",
            )
        )
    return sorted(rows, key=lambda row: row.median_ns)


def _role(trial: Trial, verdict: Verdict) -> str:
    is_winner = verdict.artifact is not None and trial.candidate == verdict.candidate
    return "winner" if is_winner else "finalist"
