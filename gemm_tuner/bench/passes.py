"""Passes in C around the product of a library, which then computes a whole layer."""

import ctypes
from pathlib import Path

import numpy as np

from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import (
    Array,
    Finish,
    GivenWeights,
    Operation,
    TeamStruct,
    has_operation,
    load_finish,
    operations_of,
    spread_of,
    sums_of_columns,
)
from gemm_tuner.libraries.openmp import system_openmp


class PassStruct(ctypes.Structure):
    """`bench_pass`."""

    _fields_ = (("run", ctypes.c_void_p), ("argument", ctypes.c_void_p))


class Pass:
    """A pass over arrays of a workload; `struct` is what a driver takes while this object lives."""

    def __init__(self, library: Path, finish: Finish) -> None:
        """Load the pass."""
        self._library = load_finish(library)
        self._finish = finish
        run = ctypes.cast(self._library.finish_rows, ctypes.c_void_p)
        self.struct = PassStruct(run, finish.address)


def convert(library: Path, source: Array, target: Array, team: TeamStruct) -> Pass:
    """Return the pass that writes one array as another of a different type."""
    return Pass(library, Finish([], source, target, team=team))


def spread(library: Path, column: Array, target: Array, team: TeamStruct) -> Pass:
    """Return the pass that writes each element of a column to its whole row of `target`."""
    zeros = np.broadcast_to(np.zeros(target.shape[1], np.float32), target.shape)
    return Pass(library, Finish([spread_of(column)], zeros, target, team=team))


def finish(library: Path, workload: Workload, sums: Array, *, fused: int, team: TeamStruct) -> Pass:
    """Return the pass that makes y of what a product with the first `fused` steps gave.

    Raises:
        BaselineMissing: the pass does not know a step.
    """
    steps = workload.problem.epilogue.steps
    arrays = list(workload.operands.values())
    read = sum(step.kind.operand is not OperandShape.NONE for step in steps[:fused])
    operations: list[Operation] = operations_of(steps[fused:], arrays[read:])
    for step in steps[fused:]:
        if not has_operation(step):
            raise BaselineMissing(
                f"no pass in C does the step {step.text!r}: {step.kind.left_to_numpy}."
            )
    is_kn = workload.problem.w_layout is WeightLayout.KN
    sums_of_w, w = None, None
    if any(one.step.kind.is_offset for one in operations):
        if workload.problem.operation.packs_ahead:
            sums_of_w = sums_of_columns(workload.w, axis=0 if is_kn else 1)
        else:
            w = GivenWeights(workload.w, is_kn)
    return Pass(library, Finish(operations, sums, workload.y, sums_of_w=sums_of_w, w=w, team=team))


def openmp_team(threads: int) -> TeamStruct:
    """Return how the OpenMP of the system runs a pass; on one thread where there is none."""
    return TeamStruct() if threads == 1 else system_openmp().team(threads)
