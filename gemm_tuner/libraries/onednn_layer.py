"""A linear layer computed by oneDNN in the fastest of all ways to ask for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, perf_counter_ns

import numpy as np

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import (
    Array,
    Finish,
    TeamStruct,
    built_finish,
    has_operation,
    operations_of,
    sums_of_columns,
)
from gemm_tuner.libraries.numpy_layer import finish
from gemm_tuner.libraries.onednn import OneDnnLibrary, open_onednn
from gemm_tuner.libraries.onednn_product import OneDnnProduct, usable_products
from gemm_tuner.libraries.openmp import OpenMp
from gemm_tuner.libraries.plain import plain_of_stored, plain_problem, text_with_plain_weights
from gemm_tuner.libraries.spelling import Spelling
from gemm_tuner.machine.core_clock import CoreClock
from gemm_tuner.machine.memory import ThreadMemory, address_of, allocate_aligned

_SUM = np.dtype(np.int32)
_ROUNDS = 5  # of calls that compare spellings, after one that does not count
_LONG_S = 0.05  # of all rounds: enough of them


# Of a range of m: what is fastest for so many rows is for more, and they take little memory.
_TRIAL_ROWS = 512

# What is packed in a call is read in it alone.
_IN_CALLS = ThreadMemory()

# The spelling of each library, plain problem and number of threads, chosen once in a process: what
# is packed for a layer fits all others of the same problem, in forked children, too.
_CHOSEN: dict[tuple[OneDnnLibrary, Problem, int | None], Spelling] = {}


class OneDnnLayer:
    """One problem, computed by oneDNN; any number of threads may call it at the same time.

    What oneDNN cannot fuse, or not fast, is done in one pass after the product (by NumPy where the
    pass could not be built), and x is converted before it where oneDNN lacks its type. Quantised
    weights are packed as plain ones of the type of x. The packed weights are followed by the sums
    of their columns, if the pass needs them.
    """

    def __init__(
        self, problem: Problem, threads: int | None, library_path: Path | None = None
    ) -> None:
        """Choose the fastest spelling, for a range of m by some of its rows.

        `threads` are those of most calls, or None for as many as OpenMP has by default. The library
        is the first that is found, unless a path says which.

        Raises:
            BaselineMissing: oneDNN cannot be loaded, or has nothing fast for the problem.
        """
        if 0 in {problem.m.high, problem.n, problem.k}:
            raise BaselineMissing(f"{problem.text} has no elements.")
        library = open_onednn(library_path) if library_path else open_onednn()
        self._given = problem
        self._problem = plain = plain_problem(problem)
        products = [one for one in usable_products(library, plain, threads) if one.bears_signals]
        if not products:
            raise BaselineMissing(
                f"{library.text} computes {plain.text} only in a way that a signal breaks."
            )
        forms = {product.spelling: _Form(product) for product in products}
        key = (library, plain, threads)
        if key not in _CHOSEN:
            _CHOSEN.setdefault(key, _fastest_of(list(forms.values()), threads))
        self._form = forms[_CHOSEN[key]]
        name = f"{library.text} + pass" if self._form.spelling.needs_passes else library.text
        self.text = text_with_plain_weights(name, problem)

    @property
    def layout(self) -> str:
        """Return how the weights are packed: each spelling has its own layout."""
        return f"{self.text} ({self.spelling})"

    @property
    def openmp(self) -> OpenMp:
        """Return the runtime whose threads it computes in."""
        return self._form.product.library

    @property
    def spelling(self) -> str:
        """Return how oneDNN is asked, and by which of its implementations it computes."""
        return f"{self._form.product.implementation}: {self._form.spelling.text}"

    def pack(self, weights: StoredWeights) -> Array:
        """Return the weights in the layout that oneDNN wants, as bytes."""
        return self._form.pack(plain_of_stored(self._given, weights))

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue.

        Rows that do not follow each other directly are copied: oneDNN has nothing fast for them.
        """
        if len(x):
            self._form.compute(x, packed, y, operands, threads)


class _Form:
    """A spelling with the passes before and after it."""

    def __init__(self, product: OneDnnProduct) -> None:
        self.product = product
        self.spelling = spelling = product.spelling
        problem = spelling.problem
        self._packed_bytes = -(-product.packed_weight_bytes // _SUM.itemsize) * _SUM.itemsize
        self._has_sums = any(step.kind.is_offset for step in spelling.rest)
        kinds = [step.kind for step in spelling.fused_steps]
        self._fused_operands = sum(kind.operand is not OperandShape.NONE for kind in kinds)
        self._pass = built_finish() if all(map(has_operation, spelling.rest)) else None
        self._product_type = NUMPY_TYPES[spelling.y]
        self._problem = problem

    def pack(self, w: Array) -> Array:
        """Return weights in the layout of the product, followed by their sums if need be."""
        problem = self._problem
        wanted = self._converted(w, self.spelling.w)
        if self.spelling.multiplies_stored_w and not self._has_sums:
            return wanted
        sums_bytes = problem.n * _SUM.itemsize if self._has_sums else 0
        allocate = allocate_aligned if problem.operation.packs_ahead else _IN_CALLS.get
        packed = allocate(self._packed_bytes + sums_bytes)
        self.product.pack(address_of(wanted), address_of(packed))
        if sums_bytes:
            axis = 1 if problem.w_layout is WeightLayout.NK else 0
            packed[self._packed_bytes :].view(_SUM)[...] = sums_of_columns(w, axis)
        return packed

    def compute(
        self, x: Array, packed: Array, y: Array, operands: Sequence[Array], threads: int | None
    ) -> None:
        """Write `epilogue(x @ w)` to y."""
        is_target = y.flags.c_contiguous and y.dtype == self._product_type
        target = y if is_target else np.empty(y.shape, self._product_type)
        fused = [
            _spread(operands[number], y.shape) if spread else np.ascontiguousarray(operands[number])
            for number, spread in zip(self.product.operands, self.product.spread, strict=True)
        ]
        if not self._problem.operation.packs_ahead:
            packed = self.pack(packed)
        self.product.compute(self._converted(x, self.spelling.x), packed, target, fused, threads)
        if self.spelling.needs_finish:
            self._finish(target, packed, y, operands[self._fused_operands :], threads)
        elif target is not y:
            y[...] = target

    def trial(self, threads: int | None) -> Callable[[], float]:
        """Return a function that computes once with zeros; it returns what counts of it, in s."""
        problem = self._problem
        rows = problem.m.high if problem.m.exact is not None else min(problem.m.high, _TRIAL_ROWS)
        x, y = (
            np.zeros((rows, columns), NUMPY_TYPES[dtype])
            for columns, dtype in ((problem.k, problem.types.x), (problem.n, problem.types.y))
        )
        operands = [
            np.zeros(_shape_of(operand.shape, y.shape), NUMPY_TYPES[problem.operand_type(operand)])
            for operand in problem.epilogue.operands
        ]
        packed = np.zeros(problem.w_shape, NUMPY_TYPES[problem.types.w])
        if problem.operation.packs_ahead:
            packed = self.pack(packed)

        clock = CoreClock(threads)

        def run() -> float:
            clock.start()
            begin_ns = perf_counter_ns()
            self.compute(x, packed, y, operands, threads)
            return clock.counted_ns(perf_counter_ns() - begin_ns) / 1e9

        return run

    def _converted(self, array: Array, dtype: DType) -> Array:
        return np.ascontiguousarray(array, NUMPY_TYPES[dtype])

    def _finish(
        self,
        sums: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,
    ) -> None:
        sums_of_w = packed[self._packed_bytes :].view(_SUM) if self._has_sums else None
        if self._pass is None:
            exact = None if sums_of_w is None else sums_of_w.astype(np.float64)
            y[...] = finish(self._problem, sums, exact, operands, self.spelling.fused)
            return
        one = Finish(
            operations_of(self.spelling.rest, operands),
            sums,
            y,
            sums_of_w=sums_of_w,
            team=self._team(threads),
        )
        with self.product.library.in_threads(threads):
            one.run(self._pass)

    def _team(self, threads: int | None) -> TeamStruct:
        library = self.product.library
        with library.in_threads(threads) as usable:
            return library.team(usable or library.max_threads())


def _fastest_of(forms: Sequence[_Form], threads: int | None) -> Spelling:
    best = pick_fastest([form.trial(threads) for form in forms]) if len(forms) > 1 else 0
    return forms[best].spelling


def pick_fastest(runs: Sequence[Callable[[], float]]) -> int:
    """Return which of several functions takes the least time, run in turn.

    Each computes the same, and returns how long that took in seconds: the least of a few counts.
    """
    least = [run() for run in runs]
    begin_s = perf_counter()
    for turn in range(_ROUNDS):
        samples = [run() for run in runs]
        least = samples if turn == 0 else list(map(min, least, samples))
        if perf_counter() - begin_s > _LONG_S:
            break
    return least.index(min(least))


def _spread(column: Array, shape: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(column[:, np.newaxis], shape))


def _shape_of(shape: OperandShape, of_y: tuple[int, ...]) -> tuple[int, ...]:
    rows, columns = of_y
    return {
        OperandShape.SCALAR: (1,),
        OperandShape.ROW_VECTOR: (columns,),
        OperandShape.COLUMN_VECTOR: (rows,),
    }.get(shape, (rows, columns))
