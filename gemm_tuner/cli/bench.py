"""`gemm-tuner bench`: time stored winners again, beside all installed baselines at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from gemm_tuner.bench.baselines.choose import Race, baseline_rows
from gemm_tuner.bench.baselines.own_kernel import ONE_THREAD
from gemm_tuner.bench.baselines.torch_weights import TORCH_WEIGHTS
from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.bench_report import BenchRow, bench_facts, print_rows
from gemm_tuner.cli.reports.roofline_plot import write_plot
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_json, print_message
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.domain.units import context_text
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import GemmTunerError, InvalidSetting, TrialFailed
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

_CHOICE = tuple(row.name for row in baseline_rows() if not row.is_last_resort)
_PAIRS = 30
_SAMPLE_NS = 5_000_000
# On a noisy machine, so many pairs say little: then more are taken, as many as fit into a time.
_WIDEST_INTERVAL = 0.05  # of the ratio, over the ratio
_PAIRS_IN_NOISE = 120
_LONGEST_IN_NOISE_NS = 20e9  # of samples; warm-ups come on top
_SEED = 2

# fmt: off
_Baselines = Annotated[
    list[str] | None, typer.Option("--baseline", help="Time beside this library; repeat it for "
                                   "more. By default beside each that is installed, except "
                                   f"torch-inductor; {ONE_THREAD}, the best stored kernel of "
                                   "one thread, where there are several. "
                                   f"One of: {', '.join(_CHOICE)}")]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the speed of each runner "
                              "over the roofline")]
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """The settings of all timings; `told` are the messages that need no repetition."""

    baselines: tuple[str, ...]
    repository: Repository
    cpu: Cpu
    toolchain: Toolchain
    told: set[str] = field(default_factory=set)


def bench(
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
    regime: options.RegimeChoice = "hot",
    baseline: _Baselines = None,
    plot: _Plot = None,
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    as_json: options.AsJson = False,
) -> None:
    """Time the best stored kernels beside all baselines at once; exit 1 if a verdict is refuted.

    A baseline that is missing, refuses, crashes or is wrong is reported and left out, as is a layer
    that cannot be timed; Ctrl-C prints what was timed before. Either of the latter two makes the
    exit code 1.
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
    check_cpus(threads)
    check_place(plot, databases=[db], others=[shapes])
    setting = _Bench(
        baselines=_chosen_baselines(baseline, layers, threads),
        repository=Repository(open_database(db, may_create=False)),
        cpu=detect_cpu(),
        toolchain=find_toolchain(compiler),
    )

    rows: list[BenchRow] = []
    is_complete = True
    try:
        for layer, context in product(layers, contexts):
            try:
                row = _time_layer(setting, layer, context)
            except GemmTunerError as error:
                is_complete = False
                print_message(f"{_name(layer, context)}: {error}")
                continue
            rows += [row] if row else []
    except KeyboardInterrupt:
        is_complete = False
        print_message("Stopped; these layers were timed before.")

    if as_json:
        print_json(bench_facts(setting.cpu, rows))
    elif rows:
        print_rows(rows)
    if plot is not None and rows:
        write_plot(plot, rows)
    if not rows and is_complete:
        print_message('Nothing to time; run "gemm-tuner sweep" for these layers first.')
    if not rows or not is_complete or any(row.is_refuted for row in rows):
        raise typer.Exit(1)


def _chosen_baselines(
    names: list[str] | None, layers: Sequence[Layer], threads: int
) -> tuple[str, ...]:
    for name in names or ():
        if name not in _CHOICE:
            raise InvalidSetting(
                f"baseline {name!r} is not known; use one of: {', '.join(_CHOICE)}."
            )
        if name == ONE_THREAD and threads == 1:
            raise InvalidSetting(
                f"baseline {name!r} says what more threads bring, but threads = 1; "
                "use it with --threads 2 or more."
            )
    if names:
        return tuple(dict.fromkeys(names))
    is_weight_only = any(layer.problem.types.is_weight_only for layer in layers)
    others = {ONE_THREAD: threads > 1, TORCH_WEIGHTS: is_weight_only}
    attends = {layer.problem.operation.has_values for layer in layers}
    usual = (
        row.name
        for row in baseline_rows()
        if (row.is_usual and False in attends) or (row.attention_alone and True in attends)
    )
    return (*usual, *(name for name, is_wanted in others.items() if is_wanted))


def _name(layer: Layer, context: ExecutionContext) -> str:
    return f"{layer.name}, {context_text(context)}"


def _time_layer(setting: _Bench, layer: Layer, context: ExecutionContext) -> BenchRow | None:
    """Return a layer's best kernel, served or not, timed beside the baselines; None without one.

    Raises:
        BaselineMissing: no baseline can be used.
        TrialFailed: the kernel is not what was proved when it was stored.
    """
    verdict = choose(setting.repository, layer.problem, cpu=setting.cpu, context=context).verdict
    build = _stored_build(setting.repository, verdict)
    if build is None:
        print_message(
            f"{_name(layer, context)}: no kernel is stored; "
            'run "gemm-tuner sweep" for this layer first.'
        )
        return None
    with (
        measuring(),  # a host calls baselines to see whether they can be used
        TrialHost(
            layer.problem,
            threads=context.threads,
            baseline=setting.baselines,
            toolchain=setting.toolchain,
            seed=_SEED,
            scalar_build=lambda: build,  # for a baseline that is named
            one_thread_build=_one_thread_build(setting, layer, context),
            races=[Race(regime=context.regime)],
        ) as host,
    ):
        timed = _time(host, build, context)
        baselines = host.baselines(context.regime)
        product_only = baselines.product_only
        left_out = baselines.left_out | timed.left_out
    _tell_left_out(setting, layer, context, left_out)
    if timed.conditions is None or timed.roofline is None:
        raise TrialFailed(
            f"the stored kernel {build.artifact.sha256[:12]} for {layer.problem.text} is "
            f"{timed.finding.outcome.value}: {timed.finding.detail}; "
            'run "gemm-tuner sweep" again and report this.'
        )
    return BenchRow(
        layer=layer,
        verdict=verdict,
        measurements=timed.measurements,
        roofline=timed.roofline,
        conditions=timed.conditions,
        toolchain=build.artifact.toolchain,
        product_only=product_only,
        left_out=left_out,
    )


def _one_thread_build(setting: _Bench, layer: Layer, context: ExecutionContext) -> Build | None:
    """Return the best stored kernel of one thread in the same regime, if it is asked for."""
    if ONE_THREAD not in setting.baselines:
        return None
    alone = replace(context, threads=1)
    verdict = choose(setting.repository, layer.problem, cpu=setting.cpu, context=alone).verdict
    return _stored_build(setting.repository, verdict)


def _stored_build(repository: Repository, verdict: Verdict) -> Build | None:
    artifact = verdict.artifact or _unserved_artifact(repository, verdict)
    if artifact is None:
        return None
    binary = repository.binary(artifact.sha256)
    text = repository.source_text(artifact.sha256)
    if binary is None or text is None:
        return None
    return Build(artifact=artifact, source=Source(text=text), binary=binary)


def _unserved_artifact(repository: Repository, verdict: Verdict) -> Artifact | None:
    """Return the kernel of a verdict that names none, because its baseline may be faster."""
    trials = repository.trials(problem=verdict.problem, cpu_key=verdict.cpu_key, only_decisive=True)
    return next(
        (
            trial.artifact
            for trial in reversed(trials)
            if trial.context == verdict.context
            and trial.measurement is not None
            and Evidence.of(trial.measurement) == verdict.measurement
        ),
        None,
    )


def _time(host: TrialHost, build: Build, context: ExecutionContext) -> TimedFinding:
    finding = host.verify(build)
    if finding.outcome is not Outcome.CORRECT:
        return TimedFinding(finding=finding)

    def time(pairs: int) -> TimedFinding:
        return host.time(
            build,
            context=context,
            pairs=pairs,
            sample_ns=_SAMPLE_NS,
            reads=True,
            checks_large_ratios=True,
        )

    timed = time(_PAIRS)
    pairs = pairs_in_noise(timed.measurements)
    return time(pairs) if pairs > _PAIRS else timed


def pairs_in_noise(measurements: Sequence[Measurement]) -> int:
    """Return how many pairs are worth their time after the usual number; 0 if that was enough.

    It is decided by how surely the ratio to the fastest baseline is known, not by what it is.
    """
    ratios = [beside.ratio for beside in measurements]
    if not ratios:
        return 0
    nearest = min(ratios, key=lambda ratio: ratio.median)
    if nearest.high - nearest.low <= _WIDEST_INTERVAL * nearest.median:
        return 0
    timings = [measurements[0].candidate, *(beside.baseline_timing for beside in measurements)]
    round_ns = sum(median(timing.samples_ns) for timing in timings)
    return min(_PAIRS_IN_NOISE, int(_LONGEST_IN_NOISE_NS / round_ns))


def _tell_left_out(
    setting: _Bench, layer: Layer, context: ExecutionContext, left_out: dict[str, str]
) -> None:
    """Say which baselines are not timed and why, each reason once."""
    for name, reason in left_out.items():
        if reason not in setting.told:
            setting.told.add(reason)
            print_message(f"{_name(layer, context)}: {name} is left out: {reason}")
