"""Prove that a kernel computes what it should and touches nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import (
    ALIGNMENT_BYTES,
    OK,
    ArgsStruct,
    ArrayView,
    KernelLibrary,
    make_args,
    make_weights,
)
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.guard import Flush, GuardedMatrix, GuardedMemory, Region
from gemm_tuner.bench.inputs import InputKind, Inputs, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import Expected, find_error, results_of_products
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.rows import Rows
from gemm_tuner.libraries.fixed_order import FixedOrder, multiplied
from gemm_tuner.runtime.load import Kernel

# Larger calls are made in fewer ways: their arithmetic is what takes time, or the copies of x, of
# which there is one for each product of a call, and those of a w that comes with it.
_LARGE_FLOP = 2_000_000_000
_LARGE_COPIED_BYTES = 1 << 28

_PREFERRED = 0  # the parts that the kernel prefers, or three if it prefers one
_FORWARDS = (False,)
_BACKWARDS = (True,)
_BOTH_ORDERS = (False, True)


class _Extent(StrEnum):
    """In how many ways a number of rows is checked."""

    FULL = "full"
    LARGE = "large"
    TAIL = "tail"  # only the handling of rows differs from a number that is checked in full


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """How the arrays of some calls lie, and how these calls are cut.

    `parts` says for each extent into how many parts the calls are cut. `orders` says for
    each run of a call whether the parts run from the last to the first. A `batch` has this many
    products, each of the same rows in another order; where w comes with each call, there are
    several `heads` of them, each product with a w of its own. Weights are packed in `pack_parts`
    parts.
    """

    kind: InputKind
    flush: Flush
    padding: int
    orders: tuple[bool, ...]
    batch: int = 1
    heads: int = 1
    pack_parts: int = 1
    parts: dict[_Extent, tuple[int, ...]]


# Arrays touch a guard page with either end while the call is cut into one part and into the
# preferred number; small calls also into 2, 3, 7, 16 and 64. The first row of a kind says how w
# lies.
# fmt: off
_SCENARIOS = (
    _Scenario(kind=InputKind.EXACT,   flush=Flush.END,   padding=0, orders=_FORWARDS,
              parts={_Extent.FULL: (1, _PREFERRED), _Extent.LARGE: (1,), _Extent.TAIL: (1,)}),
    _Scenario(kind=InputKind.EXACT,   flush=Flush.START, padding=3, orders=_FORWARDS, batch=3,
              heads=2, pack_parts=16,
              parts={_Extent.FULL: (3, 16, 64), _Extent.TAIL: (_PREFERRED,)}),
    _Scenario(kind=InputKind.NORMAL,  flush=Flush.START, padding=3, orders=_BACKWARDS,
              pack_parts=2, parts={_Extent.FULL: (1, _PREFERRED), _Extent.LARGE: (_PREFERRED,)}),
    _Scenario(kind=InputKind.SPECIAL, flush=Flush.END,   padding=5, orders=_BOTH_ORDERS,
              pack_parts=7, parts={_Extent.FULL: (2, 7), _Extent.LARGE: (_PREFERRED,)}),
    _Scenario(kind=InputKind.SPECIAL, flush=Flush.START, padding=0, orders=_FORWARDS,
              parts={_Extent.LARGE: (1,)}),
)
# fmt: on


class _GuardedWeights:
    """Weights as the caller stores them, each array between guard pages."""

    def __init__(self, problem: Problem, inputs: Inputs, scenario: _Scenario) -> None:
        """Guard copies of the arrays; scales and zero points are dense."""
        w = _guard_input("w", inputs.w, scenario)
        self._matrices = [w]
        addresses = {}
        dense = replace(scenario, padding=0)
        for name, array in (("scales", inputs.scales), ("zero_points", inputs.zero_points)):
            if array is not None:
                matrix = _guard_input(name, array, dense)
                self._matrices.append(matrix)
                addresses[name] = matrix.address
        elements_per_byte = 8 // min(8, problem.types.w.size_bits)
        self.struct = make_weights(w.address, w.leading_dimension * elements_per_byte, **addresses)

    @property
    def regions(self) -> list[Region]:
        """Return the addresses that must not be touched."""
        return [region for matrix in self._matrices for region in matrix.regions]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Right:
    """What is right: the exact result with its bounds, and the bits where the order is fixed."""

    expected: Expected
    bits: NDArray[Any] | None

    def first_rows(self, rows: int) -> "_Right":
        """Return the first rows, which do not depend on the others."""
        bits = None if self.bits is None else self.bits[:rows]
        return _Right(expected=self.expected.first_rows(rows), bits=bits)

    def of_products(self, problem: Problem, products: int) -> "_Right":
        """Return the results of some products, one below the other, as `Inputs.of_products`."""
        bits = None if self.bits is None else results_of_products(self.bits, problem, products)
        return _Right(expected=self.expected.of_products(problem, products), bits=bits)


class Case:
    """Inputs of one kind with their right result, and the weights where every kernel reads them."""

    def __init__(
        self, problem: Problem, kind: InputKind, seed: int, *, fixed_order: Path | None = None
    ) -> None:
        """Make the inputs and compute the result.

        Of a problem with a fixed order of additions, `fixed_order` is the library that defines it.
        """
        scenario = next(one for one in _SCENARIOS if one.kind is kind)
        self.inputs = make_inputs(problem, kind, seed)
        bits = None
        if problem.is_fixed:
            assert fixed_order is not None
            bits = FixedOrder.load(fixed_order).compute(
                problem,
                self.inputs.x,
                multiplied(problem, self.inputs.w, self.inputs.scales),
                [*self.inputs.operands.values()],
            )
        self._problem = problem
        self.right = _Right(expected=compute_expected(problem, self.inputs), bits=bits)
        self.w = _GuardedWeights(problem, self.inputs, scenario)
        self._of_fewer_keys: dict[tuple[int, int], tuple[Inputs, _Right]] = {}

    @property
    def expected(self) -> Expected:
        """Return the exact result with its bounds."""
        return self.right.expected

    def call_of(self, rows: int, columns: int) -> tuple[Inputs, _Right]:
        """Return the inputs of a call with fewer rows, and with fewer keys, and what is right."""
        if columns == self._problem.n:
            return self.inputs.first_rows(rows), self._right_of(rows)
        if (rows, columns) not in self._of_fewer_keys:
            problem = replace(self._problem.with_columns(columns), m=Rows(low=rows, high=rows))
            inputs = self.inputs.first_keys(columns).first_rows(rows)
            right = _Right(expected=compute_expected(problem, inputs), bits=None)
            self._of_fewer_keys[rows, columns] = inputs, right
        return self._of_fewer_keys[rows, columns]

    def _right_of(self, rows: int) -> _Right:
        """Return what is right of a call with fewer rows: what causal hides depends on them."""
        problem = self._problem
        hides = any(step.kind.hides for step in problem.epilogue.steps)
        if not hides or rows == problem.m.high:
            return self.right.first_rows(rows)
        of_rows = replace(problem, m=Rows(low=rows, high=rows))
        expected = compute_expected(of_rows, self.inputs.first_rows(rows))
        return _Right(expected=expected, bits=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The inputs of all products of a call, of `rows` rows each, and what is right."""

    rows: int
    heads: int
    inputs: Inputs
    right: _Right

    @classmethod
    def of(
        cls, case: Case, problem: Problem, scenario: _Scenario, rows: int, columns: int
    ) -> "_Call":
        """Return the call of a scenario with some rows and columns."""
        problem = problem.with_columns(columns)
        heads = 1 if problem.operation.packs_ahead else scenario.heads
        inputs, right = case.call_of(rows, columns)
        products = scenario.batch * heads
        return cls(
            rows=len(inputs.x),
            heads=heads,
            inputs=inputs.of_products(problem, products),
            right=right.of_products(problem, products),
        )


def verify(
    kernel: Kernel,
    problem: Problem,
    cases: Mapping[InputKind, Case],
    report: Report,
) -> Finding:
    """Run a kernel on every kind of input and compare it with the exact result.

    Over the runs, arrays touch a guard page with their end and with their start, rows are dense and
    apart, and the call is cut into one part, the preferred number and others, in both orders. A run
    that touches a guard page or writes to an input ends the process: `report` says where.
    """
    library = kernel.native
    checks = sizes_to_check(problem, kernel.candidate)
    for scenario in _SCENARIOS:
        case = cases[scenario.kind]
        ways = {
            size: scenario.parts.get(_limit_for_size(extent, problem, size[0]), ())
            for size, extent in checks.items()
        }
        if not any(ways.values()):
            continue
        packed_w = None
        if problem.operation.packs_ahead:
            packed_w = _pack(library, case.w, scenario, report)
            if stray_write := packed_w.find_stray_write():
                return Finding(outcome=Outcome.OUT_OF_BOUNDS, detail=stray_write)
        for (rows, columns), all_parts in ways.items():
            if not all_parts:
                continue
            call = _Call.of(case, problem, scenario, rows, columns)
            for parts in (_resolve_parts(one, library) for one in all_parts):
                run = _Run(library, problem.with_columns(columns), scenario, parts, report)
                finding = _check_run(run, packed_w, call)
                if finding.outcome is not Outcome.CORRECT:
                    size = (
                        f"m = {rows}" if problem.least_n is None else f"m = {rows}, n = {columns}"
                    )
                    where = f"{size}, {scenario.kind.value} inputs, {parts} parts"
                    return replace(finding, detail=f"{finding.detail} ({where})")
    return Finding(outcome=Outcome.CORRECT)


def rows_to_check(rows: Rows, candidate: Candidate) -> dict[int, _Extent]:
    """Return the numbers of rows that stand for a range, each with the extent of its checks.

    They are its ends, their neighbours and the middle, and the first two tiles of rows, so that
    every height of a last tile occurs. Each of several kernels has these of its own part, so that
    both sides of each boundary are among them.
    """
    found: dict[int, _Extent] = {}
    for part, kernel in candidate.kernels(rows):
        marks = {part.low, part.low + 1, (part.low + part.high) // 2, part.high - 1, part.high}
        tails = range(part.low, part.low + 2 * kernel.micro_kernel.mr + 1)
        found |= {
            count: _Extent.FULL if count in marks else _Extent.TAIL
            for count in sorted(marks.union(tails))
            if count in part
        }
    return found


def sizes_to_check(problem: Problem, candidate: Candidate) -> dict[tuple[int, int], _Extent]:
    """Return the rows and columns that stand for ranges, each pair with the extent of its checks.

    The most columns are checked with all rows that stand for theirs. A range of keys is checked
    with the fewest and the most rows too, at its ends and their neighbours, in the middle, and
    around the first ends of a panel and of a block of keys.
    """
    found = {
        (rows, problem.n): extent for rows, extent in rows_to_check(problem.m, candidate).items()
    }
    if problem.least_n is None:
        return found
    low, high = problem.least_n, problem.n
    marks = {low, low + 1, (low + high) // 2, high - 1}
    for _rows, kernel in candidate.kernels(problem.m):
        for end in (kernel.micro_kernel.nr, kernel.blocking.nc):
            marks |= {end - 1, end, end + 1}
    for columns in sorted(mark for mark in marks if low <= mark < high):
        for rows in (problem.m.low, problem.m.high):
            found[rows, columns] = _Extent.FULL
    return found


def _limit_for_size(extent: _Extent, problem: Problem, rows: int) -> _Extent:
    copied_bytes = rows * problem.types.x.row_bytes(problem.k)
    if not problem.operation.packs_ahead:
        copied_bytes = max(copied_bytes, problem.w_bytes)
    is_large = problem.flop(rows) > _LARGE_FLOP or copied_bytes > _LARGE_COPIED_BYTES
    return _Extent.LARGE if extent is _Extent.FULL and is_large else extent


def _resolve_parts(parts: int, library: KernelLibrary) -> int:
    if parts != _PREFERRED:
        return parts
    return library.preferred_parts if library.preferred_parts > 1 else 3


def _pack(
    library: KernelLibrary, w: _GuardedWeights, scenario: _Scenario, report: Report
) -> GuardedMemory:
    packed_w = _guard_block("packed w", library.packed_weight_bytes, scenario)
    report.watch_regions([*w.regions, *packed_w.regions])
    report.step()
    for part in reversed(range(scenario.pack_parts)):
        library.pack_weights(w.struct, packed_w.address, part=part, parts=scenario.pack_parts)
    packed_w.forbid_writing()
    return packed_w


@dataclass(frozen=True, slots=True)
class _Run:
    """A kernel and how it is called."""

    library: KernelLibrary
    problem: Problem
    scenario: _Scenario
    parts: int
    report: Report


def _check_run(run: _Run, packed_w: GuardedMemory | None, call: _Call) -> Finding:
    """Check calls with weights packed ahead, or with w and heads where there are none."""
    scenario, problem = run.scenario, run.problem
    rows, inputs, right = call.rows, call.inputs, call.right
    all_rows = rows * scenario.batch
    x = _guard_input("x", inputs.x, scenario)
    w = _guard_input("w", inputs.w, scenario) if packed_w is None else None
    v = _guard_input("v", inputs.v, scenario) if inputs.v is not None else None
    rows_of_w = problem.w_shape[0]
    all_rows_of_w = rows_of_w * scenario.batch
    # Vectors and scalars are matrices of a row here.
    operands = [
        (
            operand.shape,
            _guard_input(operand.name, np.atleast_2d(inputs.operands[operand.name]), scenario),
        )
        for operand in problem.epilogue.operands
    ]
    workspace = _guard_block("workspace", run.library.workspace_bytes(run.parts), scenario)
    given = [x, *([w] if w else []), *([v] if v else []), *(matrix for _shape, matrix in operands)]
    results = []
    for is_reversed in scenario.orders:
        y = GuardedMatrix(
            "y",
            right.expected.shape,
            NUMPY_TYPES[problem.types.y],
            padding=scenario.padding,
            flush=scenario.flush,
        )
        args = make_args(
            m=rows,
            batch=scenario.batch,
            heads=call.heads,
            x=_view(x, rows, all_rows),
            packed_w=packed_w.address if packed_w else 0,
            w=_view(w, rows_of_w, all_rows_of_w) if w else None,
            v=_view(v, rows_of_w, all_rows_of_w) if v else None,
            n=problem.n,
            y=_view(y, rows, all_rows),
            operands=[
                _view(operand, *_rows_of_operand(run, shape, rows)) for shape, operand in operands
            ],
            workspace=workspace.address,
        )
        regions = [region for matrix in (*given, y) for region in matrix.regions]
        regions += packed_w.regions if packed_w else []
        run.report.watch_regions([*regions, *workspace.regions])
        status = _call(run, args, is_reversed=is_reversed)
        if status != OK:
            return Finding(outcome=Outcome.WRONG, detail=f"gemm_tuner_run returned {status}")
        if stray_write := y.find_stray_write() or workspace.find_stray_write():
            return Finding(outcome=Outcome.OUT_OF_BOUNDS, detail=stray_write)
        results.append(y.values)
    return _judge(results, right)


def _view(matrix: GuardedMatrix, rows: int, rows_of_head: int = 0) -> ArrayView:
    """Return where a matrix lies, of which each product of a batch has `rows` rows.

    Those of the next head lie `rows_of_head` rows further.
    """
    step = 1 if len(matrix.values) == 1 else matrix.leading_dimension
    return ArrayView(matrix.address, matrix.leading_dimension, rows * step, rows_of_head * step)


def _rows_of_operand(run: _Run, shape: OperandShape, rows: int) -> tuple[int, int]:
    """Return the rows of an operand in each product, and in each head."""
    operation, batch = run.problem.operation, run.scenario.batch
    has_own_columns = not (operation.packs_ahead or operation.has_values)
    return {
        OperandShape.COLUMN_VECTOR: (rows, rows * batch),
        OperandShape.ROW_VECTOR: (1, batch) if has_own_columns else (0, 0),
        OperandShape.MATRIX: (rows, rows * batch),
    }.get(shape, (0, 0))


def _call(run: _Run, args: ArgsStruct, *, is_reversed: bool) -> int:
    """Return the first status that is not OK, or OK."""
    run.report.step()
    order = range(run.parts)
    for phase in range(run.library.phases):
        for part in reversed(order) if is_reversed else order:
            status = run.library.run(args, phase, part, run.parts)
            if status != OK:
                return status
    run.report.step()
    return OK


def _judge(results: Sequence[NDArray[Any]], right: _Right) -> Finding:
    first, *others = results
    error = find_error(right.expected, first) or _find_other_bits(right.bits, first)
    if error is not None:
        return Finding(outcome=Outcome.WRONG, detail=error)
    if any(not _same_bits(first, other) for other in others):
        return Finding(
            outcome=Outcome.WRONG, detail="the result depends on the order in which parts run"
        )
    return Finding(outcome=Outcome.CORRECT)


def _find_other_bits(right: NDArray[Any] | None, actual: NDArray[Any]) -> str | None:
    """Return in words which element is not what the fixed order makes of it, None if none is.

    The bits of a NaN are not promised.
    """
    if right is None:
        return None
    integers = np.dtype(f"i{right.itemsize}")
    differs = np.ascontiguousarray(actual).view(integers) != right.view(integers)
    if right.dtype.kind not in "iu":
        differs &= ~(np.isnan(right) & np.isnan(actual))
    count = int(np.count_nonzero(differs))
    if count == 0:
        return None
    row, column = (int(i) for i in np.unravel_index(np.argmax(differs), differs.shape))
    return (
        f"{count} of {differs.size} elements have other bits than the fixed order of additions "
        f"makes; y[{row}, {column}] is {float(actual[row, column])!r}, but "
        f"{float(right[row, column])!r} is right"
    )


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _guard_input(name: str, values: NDArray[Any], scenario: _Scenario) -> GuardedMatrix:
    rows, columns = values.shape
    matrix = GuardedMatrix(
        name, (rows, columns), values.dtype, padding=scenario.padding, flush=scenario.flush
    )
    matrix.set_input(values)
    return matrix


def _guard_block(name: str, size_bytes: int, scenario: _Scenario) -> GuardedMemory:
    return GuardedMemory(name, size_bytes, flush=scenario.flush, alignment_bytes=ALIGNMENT_BYTES)
