"""Geometric means of ratios, each beside one baseline in one context."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from gemm_tuner.domain.context import ExecutionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The geometric mean of the kernels' speeds over those of one baseline, or of the best."""

    context: ExecutionContext
    baseline: str
    layers: int
    value: float

    @property
    def text(self) -> str:
        """Return the mean as a line to read."""
        threads = self.context.threads
        return (
            f"geometric mean, {self.context.regime.value}, "
            f"{threads} thread{'' if threads == 1 else 's'}: {self.value:.3f} times the speed of "
            f"{self.baseline} ({self.layers} layer{'' if self.layers == 1 else 's'})"
        )

    def facts(self) -> dict[str, Any]:
        """Return the mean as JSON facts."""
        return {
            "threads": self.context.threads,
            "regime": self.context.regime.value,
            "baseline": self.baseline,
            "layers": self.layers,
            "geometric_mean": self.value,
        }


def geometric_means(ratios: Iterable[tuple[ExecutionContext, str, float]]) -> list[Mean]:
    """Return the mean of the ratios for each context and baseline."""
    of_each: dict[tuple[ExecutionContext, str], list[float]] = {}
    for context, baseline, ratio in ratios:
        of_each.setdefault((context, baseline), []).append(ratio)
    return [
        Mean(context=context, baseline=baseline, layers=len(values), value=geometric_mean(values))
        for (context, baseline), values in of_each.items()
    ]
