"""Kernels for products of two activations and attention, from where those of layers come from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.layers.sources import (
    MOST_CHOICES,
    FoundLayer,
    ServedKernels,
    Source,
    StoredKernels,
    WantedLayer,
    found_layer,
    not_behind,
    time_of,
)
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import could_be_served
from gemm_tuner.tuning.stored import kernel_or_none
from gemm_tuner.tuning.tune import tune

# Both factors were just computed.
_REGIME = Regime.HOT


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProduct(WantedLayer):
    """A product of two activations: y (rows, n) = epilogue(x (rows, k) @ w), for several `rows`.

    Or attention of as many rows to n keys, or to a number from `least_n` to n, with heads of k
    elements.
    """

    operation: str = Operation.MATMUL.value
    least_n: int | None = None

    @property
    def columns(self) -> str:
        """Return n as text, `4096` or `1..4096`."""
        return str(self.n) if self.least_n is None else f"{self.least_n}..{self.n}"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the problem of each of the rows."""
        words = self.asked | {"n": self.columns, "operation": self.operation}
        return tuple(Problem.create(**words | {"m": rows}) for rows in self.rows)


def libraries_of_pytorch(dtype: str) -> tuple[str, ...]:
    """Return the libraries, by name, that compute products in PyTorch and not elsewhere."""
    return ("mkl",) if dtype == DType.F32.value and torch.backends.mkl.is_available() else ()


def problem_text(wanted: WantedLayer, batch: Any = None) -> str:  # noqa: ANN401 - of PyTorch
    """Return the problem of a layer, a product or attention, and how many of them, in words."""
    rows = ",".join(map(str, wanted.rows))
    is_one = batch is None or (isinstance(batch, int) and batch == 1)
    many = "" if is_one else f"{batch} of "
    columns = wanted.columns if isinstance(wanted, WantedProduct) else wanted.n
    sizes = f"{rows}x{columns}x{wanted.k}"
    if isinstance(wanted, WantedProduct):
        is_attention = wanted.operation == Operation.ATTENTION.value  # whose keys lie one way
        layout = () if is_attention else (wanted.w_layout,)
        return many + " ".join((wanted.operation, wanted.dtype, sizes, *layout, wanted.epilogue))
    return f"{many}{wanted.dtype} {sizes} {wanted.epilogue}"


def find(source: Source, wanted: WantedLayer) -> FoundLayer:
    """Return the kernels for a layer, for a product of two activations, or for attention.

    Raises:
        GemmTunerError: as in `Source.find`.
    """
    if not isinstance(wanted, WantedProduct):
        return source.find(wanted)
    if isinstance(source, StoredKernels):
        return _stored(source, wanted)
    if isinstance(source, ServedKernels):
        client = source._client  # noqa: SLF001 - of this package
        served = client.kernels(wanted.problems, threads=wanted.threads, regime=_REGIME)
        return found_layer(not_behind(served, wanted.beside), _REGIME)
    found = source.find(wanted)
    kernels = [one for one in found.kernels if one.problem.operation.value == wanted.operation]
    return replace(found, kernels=tuple(kernels))


def choices(source: Source, wanted: WantedLayer) -> Sequence[FoundLayer]:
    """Return the ways to compute what is wanted that are worth a comparison, the best first.

    Raises:
        GemmTunerError: as in `Source.choices`.
    """
    if not isinstance(wanted, WantedProduct):
        return source.choices(wanted)
    found = [find(source, wanted)]
    if isinstance(source, StoredKernels) and len(wanted.rows) == 1:
        found += [found_layer([one], _REGIME) for one in _next_best(source, wanted)]
    by_kernel = {tuple(one.artifact.sha256 for one in way.kernels): way for way in found}
    return list(by_kernel.values())[:MOST_CHOICES]


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


def _next_best(source: StoredKernels, wanted: WantedProduct) -> list[Any]:
    """Return the kernels that could be served, also those that were no faster than a library."""
    cpu, context = detect_cpu(), ExecutionContext(threads=wanted.threads, regime=_REGIME)
    with source._connected():  # noqa: SLF001 - of this package
        repository = source._repository  # noqa: SLF001
        match = choose(repository, *wanted.problems, cpu=cpu, context=context)
        verdicts = could_be_served(repository, match, cpu)[:MOST_CHOICES]
        return [kernel_or_none(one, repository, cpu, wanted.threads) for one in verdicts]


def _stored(source: StoredKernels, wanted: WantedProduct) -> FoundLayer:
    cpu, context = detect_cpu(), ExecutionContext(threads=wanted.threads, regime=_REGIME)
    with source._connected():  # noqa: SLF001 - of this package
        repository = source._repository  # noqa: SLF001
        verdicts = [
            choose(repository, one, cpu=cpu, context=context).verdict for one in wanted.problems
        ]
        stored = [kernel_or_none(one, repository, cpu, wanted.threads) for one in verdicts]
    found = not_behind(stored, wanted.beside)
    taken = [pair for pair in zip(found, verdicts, strict=True) if isinstance(pair[0], Kernel)]
    each_ns = [_saved_ns(*pair) for pair in taken]
    known_ns = [one for one in each_ns if one is not None]
    saved_ns = min(known_ns, default=None) if len(known_ns) == len(each_ns) else None
    return replace(found_layer(found, _REGIME), saved_ns=saved_ns)


def _saved_ns(found: Any, verdict: Verdict) -> float | None:  # noqa: ANN401 - a kernel or none
    """Return what a kernel saves of a call, None if it was not timed for this very problem."""
    time = time_of(found, verdict)
    if time is None or verdict.measurement is None:
        return None
    return verdict.measurement.baseline_median_ns - time.greatest_ns
