"""Geometric means of ratios, each beside one baseline in one context."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.units import context_text, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The geometric mean of the kernels' speeds over those of one baseline.

    `left_out` more layers are not in it, because their measurement gives reason to doubt. Without
    any other, the value is None.
    """

    context: ExecutionContext
    baseline: str
    layers: int
    left_out: int
    value: float | None

    @property
    def text(self) -> str:
        """Return the mean as a line to read."""
        value = "none" if self.value is None else f"{self.value:.3f} times the speed"
        left_out = f", {self.left_out} left out: not believed" if self.left_out else ""
        return (
            f"geometric mean, {context_text(self.context)}: {value} of "
            f"{self.baseline} ({counted(self.layers, 'layer')}{left_out})"
        )

    def facts(self) -> dict[str, Any]:
        """Return the mean as JSON facts."""
        return {
            "threads": self.context.threads,
            "regime": self.context.regime.value,
            "baseline": self.baseline,
            "layers": self.layers,
            "left_out": self.left_out,
            "geometric_mean": self.value,
        }


def geometric_means(measured: Iterable[tuple[ExecutionContext, str, Evidence]]) -> list[Mean]:
    """Return the mean of the ratios for each context and name of a baseline."""
    of_each: dict[tuple[ExecutionContext, str], list[Evidence]] = {}
    for context, baseline, measurement in measured:
        of_each.setdefault((context, baseline), []).append(measurement)
    return [_mean(context, baseline, each) for (context, baseline), each in of_each.items()]


def _mean(context: ExecutionContext, baseline: str, measurements: list[Evidence]) -> Mean:
    ratios = [one.ratio.median for one in measurements if one.doubt is None]
    return Mean(
        context=context,
        baseline=baseline,
        layers=len(ratios),
        left_out=len(measurements) - len(ratios),
        value=geometric_mean(ratios) if ratios else None,
    )
