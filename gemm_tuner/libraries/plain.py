"""Quantised weights as plain numbers: what libraries compute with that have no use for few bits.

Libraries differ in whether they have a fast path for quantised weights, and beside a slow one any
kernel looks good: docs/decisions/0012 says more.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.quantise import QuantisedWeights, dequantise_weights
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import OperandTypes
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout


def plain_problem(problem: Problem) -> Problem:
    """Return the problem with weights of the type of x, or itself if they are not quantised."""
    types = problem.types
    if not types.is_weight_only:
        return problem
    plain_types = OperandTypes(x=types.x, w=types.x, accumulator=types.accumulator, y=types.y)
    return replace(problem, types=plain_types, w_group=None)


def plain_weights(problem: Problem, weights: QuantisedWeights) -> NDArray[Any]:
    """Return the quantised weights of `problem` as numbers, rounded to the type of x."""
    w = dequantise_weights(problem, weights).astype(NUMPY_TYPES[problem.types.x])
    return np.ascontiguousarray(w if problem.w_layout is WeightLayout.NK else w.T)


def plain_of_stored(problem: Problem, weights: StoredWeights) -> NDArray[Any]:
    """Return the weights of `problem` as numbers in its layout, those that are so uncopied."""
    if weights.scales is None:
        return weights.w
    return plain_weights(problem, QuantisedWeights(weights.w, weights.scales, weights.zero_points))


def text_with_plain_weights(text: str, problem: Problem) -> str:
    """Return the name of a library that computes a problem of quantised weights with plain ones."""
    if not problem.types.is_weight_only:
        return text
    return f"{text} with weights of {problem.types.x.value}"
