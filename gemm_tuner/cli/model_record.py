"""`gemm-tuner model record`: time a grid of candidates, and keep every sample for replays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_line, print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting, MissingCapability, PreparationStopped, TrialFailed
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.replay.grid import MOST
from gemm_tuner.replay.recorder import VISITS, Recorder
from gemm_tuner.replay.recording import (
    Recording,
    read_recordings,
    recording_path,
    write_recordings,
)
from gemm_tuner.replay.standing import stands
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.settings import SweepSettings

_MOST_CANDIDATES = 1000
_MOST_VISITS = 100


def record_command(
    m: options.OptionalRows = None,
    n: options.OptionalColumns = None,
    k: options.OptionalDepth = None,
    *,
    shapes: options.Shapes = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeChoice = "both",
    candidates: Annotated[
        int, typer.Option("--candidates", help="Candidates of each layer, at most")
    ] = MOST,
    visits: Annotated[
        int, typer.Option("--visits", help="Times that each is timed, each time beside others")
    ] = VISITS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl.gz", help="By default the file of this CPU in tuning_db"),
    ] = None,
    again: options.Again = False,
    compiler: options.Compiler = None,
) -> None:
    """Build, prove and time a grid of candidates of each layer, and keep every sample.

    What is in the file already is not recorded again while its sources, compiler and flags are the
    same. Ctrl-C keeps what is whole, and a second run goes on.
    """
    layers = layers_of(
        m=m,
        n=n,
        k=k,
        shapes=shapes,
        dtype=dtype,
        epilogue=epilogue,
        w_layout=options.with_groups(w_layout, groups),
        reduction=reduction,
        operation=operation,
    )
    contexts = options.execution_contexts(threads, regime)
    in_contexts = [(layer, layer.contexts_of(contexts)) for layer in layers]
    for layer, each in in_contexts:
        layer.problem.check_work(*(context.regime for context in each))
    _check_count("--candidates", candidates, _MOST_CANDIDATES)
    _check_count("--visits", visits, _MOST_VISITS)
    check_cpus(threads)
    check_place(out, others=[shapes], makes_folder=True)
    cpu = detect_cpu()
    path = out or recording_path(cpu)
    settings = SweepSettings(toolchain=find_toolchain(compiler))
    with (
        StopOnInterrupt() as interrupt,
        ProgressLine("recording", later_s=0.0) as line,
        measuring(interrupt.is_stopped),
    ):
        # Only now: who measured until now may have recorded there.
        kept = {one.key: one for one in _recorded_on(cpu, path)}
        found = [
            one
            for layer, each in in_contexts
            for at in each
            if (one := kept.get((layer.problem.text, at)))
        ]
        standing = {} if again else _standing(found, settings.toolchain)
        steps = _Steps(line)
        recorders = [
            (
                layer,
                Recorder(
                    problem=layer.problem,
                    contexts=each,
                    done=done,
                    cpu=cpu,
                    settings=settings,
                    report=steps.report,
                    is_stopped=interrupt.is_stopped,
                    most=candidates,
                    visits=visits,
                ),
            )
            for layer, each in in_contexts
            if len(done := _done(layer, each, standing)) < len(each)
        ]
        if recorders:  # what cannot be written is to be known before hours of work
            write_recordings(path, kept.values())
        steps.total = sum(recorder.steps for _layer, recorder in recorders)
        failures = 0
        for layer, recorder in recorders:
            steps.name = layer.name
            try:
                for one in recorder.run():
                    kept[one.key] = one
                    write_recordings(path, kept.values())
            except PreparationStopped:
                break
            except (MissingCapability, TrialFailed) as error:
                print_message(f"Error: {layer.name} is not recorded: {error}")
                failures += 1
    if not recorders:
        print_message("All of it is recorded already; --again records it anew.")
    print_line(f"{counted(len(kept), 'recording')} in {path}")
    if interrupt.is_stopped():
        print_message("Stopped; what is whole is kept: run the same command again to go on.")
    if failures or interrupt.is_stopped():
        raise typer.Exit(1)


@dataclass(slots=True)
class _Steps:
    """Tells a line how many steps of all are over, and how long the others take at this pace."""

    line: ProgressLine
    name: str = ""
    total: int = 0
    done: int = 0
    _show: Callable[[str, int, int], None] = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._show = pace(self.line)

    def report(self, stage: str, steps: int) -> None:
        """Tell of a stage, and of steps that are over."""
        self.done += steps
        self._show(f"{self.name}, {stage}", self.done, self.total)


def _recorded_on(cpu: Cpu, path: Path) -> list[Recording]:
    """Return what a file holds, nothing if it is not there.

    Raises:
        InvalidSetting: it is of another CPU.
    """
    found = read_recordings(path, may_be_empty=True) if path.exists() else []
    for one in found:
        if one.cpu.to_domain().exact_key != cpu.exact_key:
            raise InvalidSetting(
                f"{path} holds what was recorded on {one.cpu.brand}, and this is {cpu.brand}; "
                "name another file with --out."
            )
    return found


def _standing(
    found: Sequence[Recording], toolchain: Toolchain
) -> dict[tuple[str, ExecutionContext], Recording]:
    """Return by its key what need not be recorded again, and say of the rest why it is."""
    fallen = [one for one in found if not stands(one, toolchain)]
    makers = dict.fromkeys(f"{one.toolchain} and {one.generator}" for one in fallen)
    if fallen:
        print_message(
            f"Recording {counted(len(fallen), 'recording')} anew: kernels are made by "
            f"{toolchain.text} and {generator_version()} now, and were by {'; '.join(makers)}."
        )
    return {one.key: one for one in found if one not in fallen}


def _done(
    layer: Layer,
    contexts: Sequence[ExecutionContext],
    standing: Mapping[tuple[str, ExecutionContext], Recording],
) -> dict[ExecutionContext, Recording]:
    """Return the contexts in which a layer is recorded already, with what was."""
    keys = {one: (layer.problem.text, one) for one in contexts}
    return {one: standing[key] for one, key in keys.items() if key in standing}


def _check_count(name: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise InvalidSetting(f"{name} {count} is out of range; use 1 to {most}.")
