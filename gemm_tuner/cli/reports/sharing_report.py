"""`gemm-tuner sweep --share-weights`: several m of a layer that read one packed copy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_line, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.facts import ratio_facts
from gemm_tuner.domain.layer_problems import check_sharing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import bytes_text, context_text, counted
from gemm_tuner.errors import GemmTunerError, InvalidSetting, PreparationStopped
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.select.shared_weights import Option, Sharing, speed_of_library
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep_shared import sweep_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayer:
    """The kernels of some m of one layer; `format_bytes` are the packed weights of each format."""

    context: ExecutionContext
    problems: tuple[Problem, ...]
    sharing: Sharing
    format_bytes: dict[str, int]

    @property
    def title(self) -> str:
        """Return the problem without its m."""
        return self.problems[0].layer_text.replace("*x", "", 1)

    @property
    def packed_bytes(self) -> int:
        """Return the size of all packed copies."""
        return sum(self.format_bytes[name] for name in self.sharing.formats)

    @property
    def best_packed_bytes(self) -> int:
        """Return the size of all packed copies if each m had its best kernel."""
        return sum(self.format_bytes[name] for name in self.sharing.best_formats)


@dataclass(slots=True, kw_only=True)
class SharedLayers:
    """The results of sharing, `is_complete` unless a layer failed."""

    found: list[SharedLayer] = field(default_factory=list)
    is_stopped: bool = False
    is_complete: bool = True


def sharing_groups(layers: Sequence[Layer], max_loss: float) -> list[tuple[Problem, ...]]:
    """Return the problems that differ in m alone, together.

    Raises:
        InvalidSetting: no two do, or more than can share weights.
    """
    groups: dict[Problem, dict[Problem, None]] = {}
    for layer in layers:
        without_m = replace(layer.problem, m=layers[0].problem.m)
        groups.setdefault(without_m, {})[layer.problem] = None
    found = [tuple(group) for group in groups.values() if len(group) > 1]
    if not found:
        raise InvalidSetting(
            "no layer is given for several m, so there is nothing to share; "
            "write M as in '1,16,128', or leave --share-weights out."
        )
    for group in found:
        check_sharing(group, max_loss)
    return found


def share_layers(
    groups: Sequence[tuple[Problem, ...]],
    *,
    contexts: Sequence[ExecutionContext],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    max_loss: float,
) -> SharedLayers:
    """Search kernels in shared formats for each group, unless the user stops it; choose of them.

    `settings.budget_s` is the time for each problem in all contexts.
    """
    shared = SharedLayers()
    in_context = replace(settings, budget_s=settings.budget_s / len(contexts))
    work = [(group, context) for group in groups for context in contexts]
    with StopOnInterrupt() as interrupt:
        for position, (group, context) in enumerate(work, start=1):
            label = f"sharing {group[0].n}x{group[0].k} ({position} of {len(work)})"
            later_s = sum(len(later) for later, _context in work[position:]) * in_context.budget_s
            try:
                with (
                    measuring(interrupt.is_stopped),
                    ProgressLine(label, later_s=later_s) as progress,
                ):
                    sharing = sweep_shared(
                        group,
                        context=context,
                        cpu=cpu,
                        repository=repository,
                        settings=in_context,
                        max_loss=max_loss,
                        on_progress=progress.show,
                        is_stopped=interrupt.is_stopped,
                    )
            except PreparationStopped:  # while another measured
                break
            except GemmTunerError as error:
                print_message(f"Error: {group[0].n}x{group[0].k} is not shared: {error}")
                shared.is_complete = False
                continue
            if interrupt.is_stopped():
                break
            shared.found.append(_shared_layer(group, context, sharing, cpu, repository))
        shared.is_stopped = interrupt.is_stopped()
    return shared


def _shared_layer(
    group: tuple[Problem, ...],
    context: ExecutionContext,
    sharing: Sharing,
    cpu: Cpu,
    repository: Repository,
) -> SharedLayer:
    options = [option for one in sharing.kernels for option in (one.best, one.chosen)]
    return SharedLayer(
        context=context,
        problems=group,
        sharing=sharing,
        format_bytes={
            option.packed_format: _packed_bytes(option, cpu, repository) for option in options
        },
    )


def _packed_bytes(option: Option, cpu: Cpu, repository: Repository) -> int:
    """Return the size of the packed weights; a library is taken to need no more than there are."""
    artifact = option.verdict.artifact
    binary = repository.binary(artifact.sha256) if artifact else None
    if artifact is None or binary is None:
        return option.verdict.problem.w_bytes
    return load_kernel(binary, artifact=artifact, cpu=cpu).native.packed_weight_bytes


def print_shared(shared: SharedLayer, max_loss: float) -> None:
    """Print the kernel of each m beside the best for it alone, and the memory they take."""
    sharing = shared.sharing
    print_table(
        f"Shared weights: {shared.title}, {context_text(shared.context)}",
        ("m", "best alone", ">speed", "chosen", "format", ">speed", ">loss"),
        [
            (
                problem.m.text,
                _format_text(one.best),
                _speed_text(one.best),
                _name(one.chosen),
                _format_text(one.chosen),
                _speed_text(one.chosen),
                f"{one.chosen.loss:.1%}",
            )
            for problem, one in zip(shared.problems, sharing.kernels, strict=True)
        ],
    )
    uses = Counter(one.chosen.packed_format for one in sharing.kernels)
    if len(uses) > 1:
        for problem, one in zip(shared.problems, sharing.kernels, strict=True):
            if uses[one.chosen.packed_format] == 1:
                print_line(
                    f"m = {problem.m.text} has a copy of its own: no kernel that reads another "
                    f"is within {max_loss:.1%} of its best"
                )
    print_line(
        f"packed weights: {bytes_text(shared.packed_bytes)} in {_count(sharing.formats)}; "
        f"the best of each m alone would take {bytes_text(shared.best_packed_bytes)} "
        f"in {_count(sharing.best_formats)}\n"
    )


def shared_facts(shared: SharedLayer, max_loss: float) -> dict[str, Any]:
    """Return the same as JSON facts."""
    sharing = shared.sharing
    return {
        "layer": shared.title,
        "threads": shared.context.threads,
        "regime": shared.context.regime.value,
        "max_loss": max_loss,
        "formats": list(sharing.formats),
        "packed_bytes": shared.packed_bytes,
        "best_formats": list(sharing.best_formats),
        "best_packed_bytes": shared.best_packed_bytes,
        "kernels": [
            {
                "m": problem.m.text,
                "problem": problem.text,
                "best": _option_facts(one.best),
                "chosen": {**_option_facts(one.chosen), "loss": one.chosen.loss},
            }
            for problem, one in zip(shared.problems, sharing.kernels, strict=True)
        ],
    }


def _option_facts(option: Option) -> dict[str, Any]:
    verdict = option.verdict
    is_kernel = verdict.artifact is not None
    return {
        "candidate": verdict.candidate.text if verdict.candidate and is_kernel else None,
        "packed_format": option.packed_format,
        "ratio": ratio_facts(verdict.ratio) if verdict.ratio and is_kernel else None,
    }


def _name(option: Option) -> str:
    candidate = option.verdict.candidate
    return candidate.text if candidate and option.verdict.artifact else "the baseline"


def _format_text(option: Option) -> str:
    """Return the format without the type and the sizes, which are those of the table."""
    return " ".join(option.packed_format.split()[2:]) or option.packed_format


def _speed_text(option: Option) -> str:
    if option.verdict.artifact is None:
        return f"{speed_of_library(option.verdict):.3f}"
    return f"{option.verdict.ratio.median:.3f}" if option.verdict.ratio else "-"


def _count(formats: Sequence[str]) -> str:
    return counted(len(formats), "format")
