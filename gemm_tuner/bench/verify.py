"""Prove that a kernel computes what it should and touches nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.guard import Flush, GuardedMatrix, GuardedMemory
from gemm_tuner.bench.inputs import InputKind, Inputs, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import Expected, find_error
from gemm_tuner.domain.problem import Problem, Rows
from gemm_tuner.domain.record import Outcome
from gemm_tuner.runtime.abi import ALIGNMENT_BYTES, OK, ArgsStruct, KernelLibrary, make_args
from gemm_tuner.runtime.arrays import NUMPY_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """How the arrays of a run lie and how the call is cut.

    `parts` is 0 for the number that the kernel prefers. `orders` says for each run whether the
    parts run from the last to the first.
    """

    flush: Flush
    padding: int
    parts: int
    orders: tuple[bool, ...]


_SCENARIOS = {
    InputKind.EXACT: _Scenario(flush=Flush.END, padding=0, parts=1, orders=(False,)),
    InputKind.NORMAL: _Scenario(flush=Flush.START, padding=3, parts=0, orders=(True,)),
    InputKind.SPECIAL: _Scenario(flush=Flush.END, padding=5, parts=3, orders=(False, True)),
}


class Case:
    """Inputs of one kind with their exact result, and the weights where every kernel reads them."""

    def __init__(self, problem: Problem, kind: InputKind, seed: int) -> None:
        """Make the inputs and compute the result."""
        scenario = _SCENARIOS[kind]
        self.inputs = make_inputs(problem, kind, seed)
        self.expected = compute_expected(problem, self.inputs)
        self.w = _guard_input("w", self.inputs.w, scenario)


def verify(
    library: KernelLibrary,
    problem: Problem,
    cases: Mapping[InputKind, Case],
    report: Report,
) -> Finding:
    """Run a kernel on every kind of input and compare it with the exact result.

    Over the runs, arrays touch a guard page with their end and with their start, rows are dense and
    apart, and the call is cut into one part, the preferred number and three, in both orders. A run
    that touches a guard page or writes to an input ends the process: `report` says where.
    """
    for kind, scenario in _SCENARIOS.items():
        case = cases[kind]
        parts = scenario.parts or library.preferred_parts
        packed_w = _pack(library, case.w, scenario, report)
        for rows in rows_to_check(problem.m):
            run = _Run(library, NUMPY_TYPES[problem.types.y], scenario, parts, report)
            finding = _check_run(
                run, packed_w, case.inputs.first_rows(rows), case.expected.first_rows(rows)
            )
            if finding.outcome is not Outcome.CORRECT:
                where = f"m = {rows}, {kind.value} inputs, {parts} parts"
                return replace(finding, detail=f"{finding.detail} ({where})")
    return Finding(outcome=Outcome.CORRECT)


def rows_to_check(rows: Rows) -> tuple[int, ...]:
    """Return the numbers of rows that stand for a range: its ends, their neighbours, the middle."""
    wanted = {rows.low, rows.low + 1, (rows.low + rows.high) // 2, rows.high - 1, rows.high}
    return tuple(sorted(count for count in wanted if count in rows))


def _pack(
    library: KernelLibrary, w: GuardedMatrix, scenario: _Scenario, report: Report
) -> GuardedMemory:
    packed_w = _guard_block("packed w", library.packed_weight_bytes, scenario)
    report.watch_regions([*w.regions, *packed_w.regions])
    report.step()
    library.pack_weights(w.address, w.leading_dimension, packed_w.address)
    packed_w.forbid_writing()
    return packed_w


@dataclass(frozen=True, slots=True)
class _Run:
    """A kernel and how it is called."""

    library: KernelLibrary
    y_type: np.dtype[np.generic]
    scenario: _Scenario
    parts: int
    report: Report


def _check_run(run: _Run, packed_w: GuardedMemory, inputs: Inputs, expected: Expected) -> Finding:
    scenario = run.scenario
    x = _guard_input("x", inputs.x, scenario)
    # Vectors and scalars are matrices of one row here.
    operands = [
        _guard_input(name, np.atleast_2d(operand), scenario)
        for name, operand in inputs.operands.items()
    ]
    workspace = _guard_block("workspace", run.library.workspace_bytes(run.parts), scenario)
    results = []
    for is_reversed in scenario.orders:
        y = GuardedMatrix(
            "y", expected.shape, run.y_type, padding=scenario.padding, flush=scenario.flush
        )
        args = make_args(
            m=len(inputs.x),
            x=(x.address, x.leading_dimension),
            packed_w=packed_w.address,
            y=(y.address, y.leading_dimension),
            operands=[(operand.address, operand.leading_dimension) for operand in operands],
            workspace=workspace.address,
        )
        matrices = [x, *operands, y]
        regions = [region for matrix in matrices for region in matrix.regions]
        run.report.watch_regions([*regions, *packed_w.regions, *workspace.regions])
        status = _call(run, args, is_reversed=is_reversed)
        if status != OK:
            return Finding(outcome=Outcome.WRONG, detail=f"gemm_tuner_run returned {status}")
        if not y.padding_is_unchanged():
            return Finding(outcome=Outcome.OUT_OF_BOUNDS, detail="wrote between the rows of y")
        results.append(y.values)
    return _judge(results, expected)


def _call(run: _Run, args: ArgsStruct, *, is_reversed: bool) -> int:
    """Return the first status that is not OK, or OK."""
    run.report.step()
    order = range(run.parts)
    for phase in range(run.library.phases):
        for part in reversed(order) if is_reversed else order:
            status = run.library.run(args, phase, part, run.parts)
            if status != OK:
                return status
    return OK


def _judge(results: Sequence[NDArray[Any]], expected: Expected) -> Finding:
    first, *others = results
    error = find_error(expected, first)
    if error is not None:
        return Finding(outcome=Outcome.WRONG, detail=error)
    if any(not _same_bits(first, other) for other in others):
        return Finding(
            outcome=Outcome.WRONG, detail="the result depends on the order in which parts run"
        )
    return Finding(outcome=Outcome.CORRECT)


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
