"""The results of `gemm-tuner bench`, as JSON facts and as tables for people."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from gemm_tuner.bench.baselines.own_kernel import ONE_THREAD
from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports.means import Mean, geometric_means
from gemm_tuner.cli.reports.verdict_text import interval_text
from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.facts import ratio_facts
from gemm_tuner.domain.measurement import Measurement, Timing, paired_speed_ratio
from gemm_tuner.domain.record import Conditions
from gemm_tuner.domain.units import context_text, time_text
from gemm_tuner.domain.verdict import Decision, Verdict
from gemm_tuner.tuning.generator import generator_version

BEST_OF_ALL = "the best of all"
WHERE_FASTEST = ", where it is the fastest of all"

_SLOWER_BELOW = 0.97  # a winner below this share of its baseline's speed is no winner
_COLUMNS = (
    "layer",
    "context",
    "runner",
    ">time",
    ">of roofline",
    ">kernel's speed over it",
    "interval",
    "verdict",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """The best stored kernel timed beside several baselines in the same rounds.

    `roofline` is what the arithmetic or the reading of a call takes on its own. `product_only`
    names the baselines that leave the epilogue out. `left_out` says by name why others are not
    among the measurements.
    """

    layer: Layer
    verdict: Verdict
    measurements: tuple[Measurement, ...]
    roofline: Timing
    conditions: Conditions
    toolchain: str
    product_only: frozenset[str] = frozenset()
    left_out: dict[str, str]

    @property
    def best(self) -> Measurement:
        """Return the measurement beside the fastest library, or whatever was timed without any."""
        libraries = [one for one in self.measurements if one.baseline != ONE_THREAD]
        return min(libraries or self.measurements, key=lambda one: one.ratio.median)

    @property
    def is_slower_than_one_thread(self) -> bool:
        """Say whether several threads are surely slower than one, and not by the noise of runs."""
        return any(
            one.baseline == ONE_THREAD and one.ratio.high < _SLOWER_BELOW
            for one in self.measurements
        )

    @property
    def kernel_ns(self) -> float:
        """Return the time of a call of the kernel."""
        return self.best.candidate.median_ns

    @property
    def share_of_roofline(self) -> float:
        """Return the speed of the kernel over the roofline."""
        return self.share_of(self.best.candidate)

    def share_of(self, timing: Timing) -> float:
        """Return the speed of whatever was timed over the roofline, in the rounds of both."""
        rounds = min(len(timing.samples_ns), len(self.roofline.samples_ns))
        return paired_speed_ratio(timing.first(rounds), self.roofline.first(rounds)).median

    @property
    def is_refuted(self) -> bool | None:
        """Say whether this contradicts a verdict that the kernel is faster than its baseline.

        None where that baseline was not timed, or only in a way that gives reason to doubt.
        """
        measured = self.verdict.measurement
        if self.verdict.decision is not Decision.TUNED or measured is None:
            return False
        ratios = [
            beside.ratio.median
            for beside in self.measurements
            if beside.baseline.split()[0] == measured.baseline.split()[0]
            and why_doubted(beside) is None
        ]
        return min(ratios) < _SLOWER_BELOW if ratios else None

    @property
    def doubt(self) -> str | None:
        """Return why the ratio to the fastest library is not believed, None if it is."""
        return why_doubted(self.best)

    @property
    def _verdict_text(self) -> str:
        words = [self.verdict.decision.value]
        words += {True: ["refuted"], False: [], None: ["not checked"]}[self.is_refuted]
        words += ["not served"] if self.verdict.artifact is None else []
        words += ["slower than one thread"] if self.is_slower_than_one_thread else []
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
            "roofline_ns": self.roofline.median_ns,
            "share_of_roofline": self.share_of_roofline,
            "refuted": self.is_refuted,
            "baselines": [
                {
                    "baseline": beside.baseline,
                    "implementation": beside.implementation,
                    "computes": "product" if beside.baseline in self.product_only else "layer",
                    "median_ns": beside.baseline_timing.median_ns,
                    "share_of_roofline": self.share_of(beside.baseline_timing),
                    "ratio": ratio_facts(beside.ratio),
                    "doubt": why_doubted(beside),
                }
                for beside in self.measurements
            ],
            "best_baseline": self.best.baseline,
            "left_out": self.left_out,
            "toolchain": self.toolchain,
            "conditions": asdict(self.conditions),
        }

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows of the table: the kernel beside the best of all, then each baseline."""
        candidate = self.verdict.candidate
        kernel = (
            self.layer.name,
            context_text(self.verdict.context),
            candidate.text if candidate else "",
            time_text(self.kernel_ns),
            f"{self.share_of_roofline:.1%}",
            f"{self.best.ratio.median:.3f}",
            f"beside {BEST_OF_ALL}",
            self._verdict_text,
        )
        return [kernel, *(self._cells_of(beside) for beside in self.measurements)]

    def _cells_of(self, beside: Measurement) -> tuple[str, ...]:
        only = ", product only" if beside.baseline in self.product_only else ""
        return (
            "",
            "",
            f"  {beside.baseline}{only}",
            time_text(beside.baseline_timing.median_ns),
            f"{self.share_of(beside.baseline_timing):.1%}",
            f"{beside.ratio.median:.3f}",
            interval_text(beside.ratio),
            f"not believed: {doubt}" if (doubt := why_doubted(beside)) else beside.implementation,
        )


def means_of(rows: Iterable[BenchRow]) -> list[Mean]:
    """Return the mean beside each baseline for each context; then where each is the fastest.

    There is none beside the best of all: it would be one over different baselines.
    """
    measured: list[tuple[ExecutionContext, str, Evidence]] = []
    best: list[tuple[ExecutionContext, str, Evidence]] = []
    for row in rows:
        context = row.verdict.context
        measured += [(context, one.baseline, Evidence.of(one)) for one in row.measurements]
        if len(row.measurements) > 1:
            fastest = Evidence.of(row.best)
            best.append((context, f"{fastest.baseline}{WHERE_FASTEST}", fastest))
    return geometric_means([*measured, *best])


def bench_facts(cpu: Cpu, rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Return all rows and their means as JSON facts, with when and where they were measured."""
    return {
        "cpu": cpu.brand,
        "cpu_key": cpu.exact_key,
        "generator": generator_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "layers": [row.facts() for row in rows],
        "means": [mean.facts() for mean in means_of(rows)],
    }


def print_rows(rows: Sequence[BenchRow]) -> None:
    """Print the table, grouped by layer, and the means."""
    print_table("Bench", _COLUMNS, [cells for row in rows for cells in row.cells()])
    print_line("")
    for mean in means_of(rows):
        print_line(mean.text)
