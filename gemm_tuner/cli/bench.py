"""`gemm-tuner bench`: time stored winners again, beside each installed baseline."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import typer

from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.roofline import measure_read_rates, roofline_ns
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli import options
from gemm_tuner.cli.layers import Layer, layers_of
from gemm_tuner.cli.output import print_json, print_message, print_table, time_text
from gemm_tuner.cli.report import context_text, interval_text, ratio_facts
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.domain.verdict import Decision, Verdict
from gemm_tuner.errors import BaselineMissing, NotEnoughMemory, TrialFailed
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository

_BASELINES = ("onednn", "openblas")
_PAIRS = 30
_SAMPLE_NS = 10_000_000
_SEED = 2
_COLUMNS = (
    "layer",
    "context",
    ">kernel",
    ">of roofline",
    "baseline",
    ">its time",
    ">ratio",
    "interval of the ratio",
    "verdict",
)
_SLOWER_BELOW = 0.97  # a tuned winner below this share of its baseline's speed is no winner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A stored winner timed beside one baseline, and the least time that a call can take."""

    layer: Layer
    verdict: Verdict
    measurement: Measurement
    roofline_ns: float

    @property
    def is_refuted(self) -> bool:
        """Say whether this contradicts a verdict that the kernel is faster than this baseline."""
        measured = self.verdict.measurement
        return (
            self.verdict.decision is Decision.TUNED
            and measured is not None
            and measured.baseline.split()[0] == self.measurement.baseline.split()[0]
            and self.measurement.ratio.median < _SLOWER_BELOW
        )

    def facts(self) -> dict[str, Any]:
        """Return the row as JSON facts."""
        timing, beside = self.measurement.candidate, self.measurement.baseline_timing
        candidate = self.verdict.candidate
        return {
            "name": self.layer.name,
            "problem": self.layer.problem.text,
            "threads": self.verdict.context.threads,
            "regime": self.verdict.context.regime.value,
            "decision": self.verdict.decision.value,
            "candidate": candidate.text if candidate else None,
            "median_ns": timing.median_ns,
            "baseline": self.measurement.baseline,
            "baseline_median_ns": beside.median_ns,
            "ratio": ratio_facts(self.measurement.ratio),
            "roofline_ns": self.roofline_ns,
            "share_of_roofline": self.roofline_ns / timing.median_ns,
            "refuted": self.is_refuted,
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row as the cells of the table."""
        timing, beside = self.measurement.candidate, self.measurement.baseline_timing
        return (
            self.layer.name,
            context_text(self.verdict.context),
            time_text(timing.median_ns),
            f"{self.roofline_ns / timing.median_ns:.1%}",
            self.measurement.baseline,
            time_text(beside.median_ns),
            f"{self.measurement.ratio.median:.3f}",
            interval_text(self.measurement.ratio),
            f"{self.verdict.decision.value}{', refuted' if self.is_refuted else ''}",
        )


def bench(
    m: options.OptionalRows = None,
    n: options.OptionalColumns = None,
    k: options.OptionalDepth = None,
    *,
    shapes: options.Shapes = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    threads: options.Threads = 1,
    regime: options.RegimeChoice = "hot",
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    as_json: options.AsJson = False,
) -> None:
    """Time stored winners beside each baseline; exit with 1 if one is over 3 % slower.

    A layer that cannot be timed is reported and left out; Ctrl-C prints what was timed before.
    Either makes the exit code 1.
    """
    layers = layers_of(
        m=m, n=n, k=k, shapes=shapes, dtype=dtype, epilogue=epilogue, w_layout=w_layout
    )
    contexts = options.execution_contexts(threads, regime)
    repository = Repository(open_database(db))
    cpu = detect_cpu()
    toolchain = find_toolchain(compiler)

    rows: list[_Row] = []
    is_complete = True
    try:
        for layer, context in product(layers, contexts):
            verdict = choose(repository, layer.problem, cpu=cpu, context=context).verdict
            name = f"{layer.name}, {context_text(context)}"
            build = _stored_build(repository, verdict)
            if build is None:
                print_message(
                    f"{name}: no kernel is served, the verdict is {verdict.decision.value}."
                )
                continue
            try:
                rows += _time_beside_baselines(layer, verdict, build, cpu, toolchain)
            except (NotEnoughMemory, TrialFailed) as error:
                is_complete = False
                print_message(f"{name}: {error}")
    except KeyboardInterrupt:
        is_complete = False
        print_message("Stopped; these layers were timed before.")

    if as_json:
        print_json({"cpu": cpu.brand, "layers": [row.facts() for row in rows]})
    elif rows:
        print_table("Bench", _COLUMNS, [row.cells() for row in rows])
    if not rows and is_complete:
        print_message('Nothing to time; run "gemm-tuner sweep" for these layers first.')
    if not rows or not is_complete or any(row.is_refuted for row in rows):
        raise typer.Exit(1)


def _stored_build(repository: Repository, verdict: Verdict) -> Build | None:
    artifact = verdict.artifact
    if artifact is None:
        return None
    binary = repository.binary(artifact.sha256)
    text = repository.source_text(artifact.sha256)
    if binary is None or text is None:
        return None
    return Build(artifact=artifact, source=Source(text=text), binary=binary)


def _time_beside_baselines(
    layer: Layer, verdict: Verdict, build: Build, cpu: Cpu, toolchain: Toolchain
) -> list[_Row]:
    """Time one build beside each installed baseline, each in a fresh process.

    Raises:
        BaselineMissing: there is none.
        TrialFailed: the kernel is not what was proved when it was stored.
    """
    rows, missing = [], []
    rows_of_x = layer.problem.m.high
    read_rates = measure_read_rates(
        build_drivers(toolchain, cpu).roofline,
        layer.problem,
        rows_of_x,
        regime=verdict.context.regime,
        l3_bytes=cpu.caches.l3_bytes,
    )
    for baseline in _BASELINES:
        try:
            timed = _time_beside(baseline, layer, verdict, build, toolchain)
        except BaselineMissing as error:
            missing.append(str(error))
            continue
        if timed.measurement is None or timed.conditions is None:
            raise TrialFailed(
                f"the stored kernel {build.artifact.sha256[:12]} for {layer.problem.text} is "
                f"{timed.finding.outcome.value}: {timed.finding.detail}; "
                'run "gemm-tuner sweep" again and report this.'
            )
        least_ns = roofline_ns(
            layer.problem,
            rows_of_x,
            peak_flop_per_s=timed.conditions.peak_flop_per_s,
            read_rates=read_rates,
            cores=verdict.context.threads,
        )
        rows.append(
            _Row(
                layer=layer,
                verdict=verdict,
                measurement=timed.measurement,
                roofline_ns=least_ns,
            )
        )
    if not rows:
        raise BaselineMissing(" ".join(missing))
    return rows


def _time_beside(
    baseline: str, layer: Layer, verdict: Verdict, build: Build, toolchain: Toolchain
) -> TimedFinding:
    host = TrialHost(
        layer.problem,
        threads=verdict.context.threads,
        baseline=baseline,
        toolchain=toolchain,
        seed=_SEED,
        scalar_build=build,  # not used: the baseline is named
    )
    with host:
        finding = host.verify(build)
        if finding.outcome is not Outcome.CORRECT:
            return TimedFinding(finding=finding)
        return host.time(build, context=verdict.context, pairs=_PAIRS, sample_ns=_SAMPLE_NS)
