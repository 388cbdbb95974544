"""What `gemm-tuner bench` found, as JSON facts and as the tables a person reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from gemm_tuner.cli.layers import Layer
from gemm_tuner.cli.output import print_line, print_table, time_text
from gemm_tuner.cli.report import context_text, interval_text, ratio_facts
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.verdict import Decision, Verdict

BEST_OF_ALL = "the best of all"

_SLOWER_BELOW = 0.97  # a tuned winner below this share of its baseline's speed is no winner
_COLUMNS = (
    "layer",
    "context",
    "callee",
    ">time",
    ">of roofline",
    ">kernel's speed over it",
    "interval",
    "verdict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """The best stored kernel timed beside several baselines in the same rounds.

    `roofline_ns` is the least time that a call can take. `product_only` names the baselines that
    leave the epilogue out. `left_out` says by name why others are not among the measurements.
    """

    layer: Layer
    verdict: Verdict
    measurements: tuple[Measurement, ...]
    roofline_ns: float
    product_only: frozenset[str] = frozenset()
    left_out: dict[str, str]

    @property
    def best(self) -> Measurement:
        """Return the measurement beside the fastest baseline."""
        return min(self.measurements, key=lambda measurement: measurement.ratio.median)

    @property
    def kernel_ns(self) -> float:
        """Return the time of a call of the kernel."""
        return self.best.candidate.median_ns

    @property
    def is_refuted(self) -> bool:
        """Say whether this contradicts a verdict that the kernel is faster than its baseline."""
        measured = self.verdict.measurement
        if self.verdict.decision is not Decision.TUNED or measured is None:
            return False
        return any(
            beside.baseline.split()[0] == measured.baseline.split()[0]
            and beside.ratio.median < _SLOWER_BELOW
            for beside in self.measurements
        )

    @property
    def _verdict_text(self) -> str:
        words = [self.verdict.decision.value]
        words += ["refuted"] if self.is_refuted else []
        words += ["not served"] if self.verdict.artifact is None else []
        return ", ".join(words)

    def facts(self) -> dict[str, Any]:
        """Return the row as JSON facts."""
        candidate = self.verdict.candidate
        return {
            "name": self.layer.name,
            "problem": self.layer.problem.text,
            "threads": self.verdict.context.threads,
            "regime": self.verdict.context.regime.value,
            "decision": self.verdict.decision.value,
            "served": self.verdict.artifact is not None,
            "candidate": candidate.text if candidate else None,
            "median_ns": self.kernel_ns,
            "roofline_ns": self.roofline_ns,
            "share_of_roofline": self.roofline_ns / self.kernel_ns,
            "refuted": self.is_refuted,
            "baselines": [
                {
                    "baseline": beside.baseline,
                    "computes": "product" if beside.baseline in self.product_only else "layer",
                    "median_ns": beside.baseline_timing.median_ns,
                    "share_of_roofline": self.roofline_ns / beside.baseline_timing.median_ns,
                    "ratio": ratio_facts(beside.ratio),
                }
                for beside in self.measurements
            ],
            "best_baseline": self.best.baseline,
            "left_out": self.left_out,
        }

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table: the kernel beside the best of all, then each baseline."""
        candidate = self.verdict.candidate
        kernel = (
            self.layer.name,
            context_text(self.verdict.context),
            candidate.text if candidate else "",
            time_text(self.kernel_ns),
            f"{self.roofline_ns / self.kernel_ns:.1%}",
            f"{self.best.ratio.median:.3f}",
            f"beside {BEST_OF_ALL}",
            self._verdict_text,
        )
        return [kernel, *(self._cells_of(beside) for beside in self.measurements)]

    def _cells_of(self, beside: Measurement) -> tuple[str, ...]:
        only = ", product only" if beside.baseline in self.product_only else ""
        time_ns = beside.baseline_timing.median_ns
        return (
            "",
            "",
            f"  {beside.baseline}{only}",
            time_text(time_ns),
            f"{self.roofline_ns / time_ns:.1%}",
            f"{beside.ratio.median:.3f}",
            interval_text(beside.ratio),
            "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The geometric mean of the kernels' speeds over those of one baseline, or of the best."""

    context: ExecutionContext
    baseline: str
    layers: int
    value: float

    def facts(self) -> dict[str, Any]:
        """Return the mean as JSON facts."""
        return {
            "threads": self.context.threads,
            "regime": self.context.regime.value,
            "baseline": self.baseline,
            "layers": self.layers,
            "geometric_mean": self.value,
        }


def means_of(rows: Iterable[BenchRow]) -> list[Mean]:
    """Return the mean beside each baseline and beside the best of all, for each context."""
    ratios: dict[tuple[ExecutionContext, str], list[float]] = {}
    for row in rows:
        context = row.verdict.context
        for beside in row.measurements:
            ratios.setdefault((context, beside.baseline), []).append(beside.ratio.median)
        ratios.setdefault((context, BEST_OF_ALL), []).append(row.best.ratio.median)
    return [
        Mean(context=context, baseline=baseline, layers=len(values), value=geometric_mean(values))
        for (context, baseline), values in ratios.items()
    ]


def bench_facts(cpu: str, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Return all rows and their means as JSON facts."""
    return {
        "cpu": cpu,
        "layers": [row.facts() for row in rows],
        "means": [mean.facts() for mean in means_of(rows)],
    }


def print_rows(rows: Sequence[BenchRow]) -> None:
    """Print the table, grouped by layer, and the means."""
    print_table("Bench", _COLUMNS, [cells for row in rows for cells in row.cells()])
    print_line("")
    for mean in means_of(rows):
        plural = "" if mean.layers == 1 else "s"
        print_line(
            f"geometric mean, {context_text(mean.context)}: {mean.value:.3f} times the speed of "
            f"{mean.baseline} ({mean.layers} layer{plural})"
        )
