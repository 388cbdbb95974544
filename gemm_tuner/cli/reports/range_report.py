"""`gemm-tuner sweep --split-range`: a range of m as one library, and what each m loses by it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports.sweep_report import verdict_facts
from gemm_tuner.cli.reports.verdict_text import decision_text
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.units import bytes_text, context_text, time_text
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import GemmTunerError, InvalidSetting, PreparationStopped
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.select.measured_range import MeasuredRows, mean_loss
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.ranges.boundaries import can_be_split, first_rows
from gemm_tuner.tuning.ranges.range_search import Stopped
from gemm_tuner.tuning.ranges.split_range import SplitRange, split_range
from gemm_tuner.tuning.settings import SweepSettings


def check_ranges(layers: Sequence[Layer], others: Mapping[str, bool]) -> None:
    """Check that each layer has a range of m, and that nothing is asked for beside.

    Raises:
        InvalidSetting: one has a single m, or there is another option.
    """
    for name, is_given in others.items():
        if is_given:
            raise InvalidSetting(f"{name} and --split-range do not go together; leave one out.")
    for layer in layers:
        if not can_be_split(layer.problem.m):
            raise InvalidSetting(
                f"m = {layer.problem.m.text} of {layer.name} is no range; write M as in 1..512, or "
                "leave --split-range out."
            )


def split_ranges(
    layers: Sequence[Layer],
    *,
    contexts: Sequence[ExecutionContext],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    as_json: bool,
) -> None:
    """Tune and print each layer in each context as one library.

    `settings.budget_s` is the time for each m, in all contexts.

    Raises:
        Exit: the user stopped it, or one of several layers failed.
    """
    in_context = replace(settings, budget_s=settings.budget_s / len(contexts))
    work = [(layer, context) for layer in layers for context in layer.contexts_of(contexts)]
    facts, is_complete = [], True
    with StopOnInterrupt() as interrupt:
        for place, (layer, context) in enumerate(work):
            later = [first_rows(other.problem.m) for other, _context in work[place + 1 :]]
            later_s = in_context.budget_s * sum(map(len, later))
            try:
                with (
                    measuring(interrupt.is_stopped),
                    ProgressLine(layer.name, later_s=later_s) as line,
                ):
                    found = split_range(
                        layer.problem,
                        context=context,
                        cpu=cpu,
                        repository=repository,
                        settings=in_context,
                        on_progress=line.show,
                        is_stopped=interrupt.is_stopped,
                    )
            except (Stopped, PreparationStopped):
                print_message(
                    "Stopped; what was found is kept: run the same command again to resume."
                )
                is_complete = False
                break
            except GemmTunerError as error:
                if len(work) == 1:
                    raise
                print_message(f"Error: {layer.name} is not split: {error}")
                is_complete = False
                continue
            packed_bytes = _packed_bytes(found.trial, cpu, repository)
            verdict = choose(repository, layer.problem, cpu=cpu, context=context).verdict
            facts.append(_facts(verdict, found, packed_bytes))
            if not as_json:
                _print(verdict, found, packed_bytes)
    if as_json:
        print_json({"cpu": cpu.brand, "ranges": facts})
    if not is_complete:
        raise typer.Exit(1)


def print_curve(problem: Problem, measured: Sequence[MeasuredRows]) -> None:
    """Print the time over m of a library for a range, beside the kernel for each m alone."""
    print_table(
        f"Time over m: {problem.text}",
        ("m", ">library", ">kernel for this m", ">loss", ">baseline", "kernel for this m alone"),
        [
            (
                str(one.rows),
                time_text(_call_ns(one.timed)),
                time_text(_call_ns(one.alone_timed)),
                f"{one.loss:.1%}",
                time_text(one.timed.baseline_timing.median_ns),
                one.alone.candidate.text,
            )
            for one in measured
        ],
    )
    print_line(
        f"loss: {mean_loss(measured):.1%} in the mean over {len(measured)} m, "
        f"{max(one.loss for one in measured):.1%} at worst"
    )
    slower = [str(one.rows) for one in measured if one.timed.ratio.high < 1.0]
    if slower:
        print_line(
            f"slower than the baseline at m = {', '.join(slower)}; only the greatest m decides "
            "whether a range is served, so choose another range where these m count"
        )
    disturbed = [str(one.rows) for one in measured if one.is_doubted]
    if disturbed:
        print_line(
            f"not believed: other work disturbed the times at m = {', '.join(disturbed)}; sweep "
            "again when the machine is calm, and these are timed anew"
        )


def print_kernels(problem: Problem, candidate: Candidate) -> None:
    """Print which kernel of a library computes which m."""
    for rows, kernel in candidate.kernels(problem.m):
        print_line(f"m = {rows.text}: {kernel.text}")


def curve_facts(measured: Sequence[MeasuredRows]) -> dict[str, Any]:
    """Return what `print_curve` prints as JSON facts."""
    if not measured:
        return {}
    return {
        "mean_loss": mean_loss(measured),
        "worst_loss": max(one.loss for one in measured),
        "curve": [
            {
                "m": one.rows,
                "call_ns": _call_ns(one.timed),
                "alone_ns": _call_ns(one.alone_timed),
                "baseline_ns": one.timed.baseline_timing.median_ns,
                "alone": one.alone.candidate.text,
                "loss": one.loss,
                "is_doubted": one.is_doubted,
            }
            for one in measured
        ],
    }


def kernel_facts(problem: Problem, candidate: Candidate) -> list[dict[str, str]]:
    """Return which kernel of a library computes which m."""
    return [
        {"m": rows.text, "candidate": kernel.text} for rows, kernel in candidate.kernels(problem.m)
    ]


def _print(verdict: Verdict, found: SplitRange, packed_bytes: int) -> None:
    problem = verdict.problem
    print_line(f"{problem.text}, {context_text(verdict.context)}")
    print_kernels(problem, found.trial.candidate)
    print_curve(problem, found.measured)
    print_line(f"packed weights: {bytes_text(packed_bytes)} in 1 copy for all m")
    print_line(f"at m = {problem.m.high}: {decision_text(verdict)}\n")


def _facts(verdict: Verdict, found: SplitRange, packed_bytes: int) -> dict[str, Any]:
    trial, problem = found.trial, verdict.problem
    return {
        **verdict_facts(verdict),
        "library": trial.artifact.sha256 if trial.artifact else None,
        "packed_bytes": packed_bytes,
        "kernels": kernel_facts(problem, trial.candidate),
        **curve_facts(found.measured),
    }


def _packed_bytes(trial: Trial, cpu: Cpu, repository: Repository) -> int:
    binary = repository.binary(trial.artifact.sha256) if trial.artifact else None
    if trial.artifact is None or binary is None:
        return trial.problem.w_bytes
    return load_kernel(binary, artifact=trial.artifact, cpu=cpu).native.packed_weight_bytes


def _call_ns(measurement: Measurement) -> float:
    return measurement.candidate.median_ns
