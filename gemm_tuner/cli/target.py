"""`gemm-tuner sweep --target`: choose and prove kernels for a CPU that is not here."""

from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import typer

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_json, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, isa_text
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.shortlist import Shortlist, predict


def predict_layers(
    layers: tuple[Layer, ...],
    *,
    contexts: tuple[ExecutionContext, ...],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    as_json: bool,
) -> None:
    """Choose and prove kernels of each layer for `cpu`, and print the shortlists.

    Regimes share a shortlist, since nothing is timed. The exit code is 1 if a layer has none.
    """
    found: list[tuple[Layer, Shortlist]] = []
    failures: list[tuple[Layer, str]] = []
    started_s = monotonic()
    with StopOnInterrupt() as interrupt:
        for position, layer in enumerate(layers, start=1):
            if interrupt.is_stopped():
                break
            label = f"{layer.name} ({position} of {len(layers)})"
            try:
                with ProgressLine(label, later_s=0.0) as progress:
                    shortlist = predict(
                        layer.problem,
                        context=layer.contexts_of(contexts)[0],
                        cpu=cpu,
                        repository=repository,
                        settings=settings,
                        on_progress=partial(
                            _show_at_pace,
                            progress,
                            before=position - 1,
                            layers=len(layers),
                            started_s=started_s,
                            budget_s=settings.budget_s,
                        ),
                        is_stopped=interrupt.is_stopped,
                    )
            except GemmTunerError as error:
                if len(layers) == 1:
                    raise
                print_message(f"Error: {layer.name} has no kernel: {error}")
                failures.append((layer, str(error)))
                continue
            found.append((layer, shortlist))
            for trial in shortlist.failed:
                print_message(
                    f"Warning: {layer.name}: {trial.candidate.text}: {trial.outcome.value}: "
                    f"{trial.detail}"
                )
    if as_json:
        print_json(
            {
                "target": cpu.brand,
                "layers": [_facts(layer, shortlist) for layer, shortlist in found],
                "failures": [{"name": layer.name, "error": text} for layer, text in failures],
            }
        )
    else:
        print_table(
            f"Predicted for {cpu.brand}: proved, not timed",
            ("layer", "problem", ">proved", ">failed", "emulated", "the model's first"),
            [_row(layer, shortlist) for layer, shortlist in found],
        )
    if interrupt.is_stopped():
        print_message("Stopped; what was proved is kept: run the same command again to resume.")
    if interrupt.is_stopped() or failures or not all(one.proven for _layer, one in found):
        raise typer.Exit(1)


def time_left_s(elapsed_s: float, *, done: float, longest_s: float) -> float:
    """Return the time left at the pace so far, of which a share is `done`; never over the longest.

    Proofs take a small part of their budget, so that the budget alone would say far too much.
    """
    return min(longest_s, elapsed_s * (1 - done) / done) if done > 0 else longest_s


def _show_at_pace(
    progress: ProgressLine,
    step: Progress,
    *,
    before: int,
    layers: int,
    started_s: float,
    budget_s: float,
) -> None:
    left_s = time_left_s(
        monotonic() - started_s,
        done=(before + step.done / step.total) / layers,
        longest_s=step.remaining_s + (layers - before - 1) * budget_s,
    )
    progress.show(replace(step, remaining_s=left_s))


def _row(layer: Layer, shortlist: Shortlist) -> tuple[str, ...]:
    proven = shortlist.proven
    emulated = isa_text(proven[0].emulated) if proven and proven[0].emulated else ""
    return (
        layer.name,
        layer.problem.text,
        str(len(proven)),
        str(len(shortlist.failed)),
        emulated,
        proven[0].candidate.text if proven else "",
    )


def _facts(layer: Layer, shortlist: Shortlist) -> dict[str, Any]:
    return {
        "name": layer.name,
        "problem": layer.problem.text,
        "proved": [
            {"candidate": trial.candidate.text, "emulated": sorted(trial.emulated)}
            for trial in shortlist.proven
        ],
        "failed": [
            {
                "candidate": trial.candidate.text,
                "outcome": trial.outcome.value,
                "detail": trial.detail,
            }
            for trial in shortlist.failed
        ],
    }
