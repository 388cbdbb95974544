"""Kernels for products of two activations and attention, from where those of layers come from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.layers.sources import FoundLayer, ServedKernels, Source, StoredKernels, WantedLayer
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.tuning.stored import kernel_or_none
from gemm_tuner.tuning.tune import tune

# Both factors were just computed.
_REGIME = Regime.HOT


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProduct(WantedLayer):
    """A product of two activations: y (rows, n) = epilogue(x (rows, k) @ w), for several `rows`.

    Or attention of as many rows to n keys, with heads of k elements.
    """

    operation: str = Operation.MATMUL.value

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problem of each of the rows."""
        words = self.asked | {"operation": self.operation}
        return tuple(Problem.create(**words | {"m": rows}) for rows in self.rows)


def find(source: Source, wanted: WantedLayer) -> FoundLayer:
    """Return the kernels for a layer, for a product of two activations, or for attention.

    Raises:
        GemmTunerError: as in `Source.find`.
    """
    if not isinstance(wanted, WantedProduct):
        return source.find(wanted)
    if isinstance(source, StoredKernels):
        return _told(_stored(source, wanted))
    if isinstance(source, ServedKernels):
        client = source._client  # noqa: SLF001 - of this package
        return _told(client.kernels(wanted.problems, threads=wanted.threads, regime=_REGIME))
    found = source.find(wanted)
    kernels = [one for one in found.kernels if one.problem.operation.value == wanted.operation]
    return replace(found, kernels=tuple(kernels))


def tune_wanted(source: Source, wanted: WantedLayer, budget_s: float) -> None:
    """Tune a layer, a product of two activations, or attention, unless it was tuned before.

    Raises:
        GemmTunerError: as in `Source.tune`.
    """
    if isinstance(wanted, WantedProduct) and isinstance(source, StoredKernels):
        for problem in wanted.problems:
            tune(
                problem,
                threads=wanted.threads,
                regime=_REGIME,
                budget_s=budget_s,
                db_url=source.text,
            )
    else:
        source.tune(wanted, budget_s)


def _stored(source: StoredKernels, wanted: WantedProduct) -> list[Any]:
    cpu, context = detect_cpu(), ExecutionContext(threads=wanted.threads, regime=_REGIME)
    with source._connected():  # noqa: SLF001 - of this package
        repository = source._repository  # noqa: SLF001
        verdicts = [
            choose(repository, one, cpu=cpu, context=context).verdict for one in wanted.problems
        ]
        return [kernel_or_none(one, repository, cpu, wanted.threads) for one in verdicts]


def _told(found: Sequence[Any]) -> FoundLayer:
    kernels = {one.artifact.sha256: one for one in found if isinstance(one, Kernel)}
    others = dict.fromkeys(one.reason for one in found if not isinstance(one, Kernel))
    return FoundLayer(kernels=tuple(kernels.values()), reasons=tuple(others), regime=_REGIME)
