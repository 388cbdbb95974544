"""Attention as libraries are asked for it: a scale, and one mask of what is hidden or added."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTerms:
    """The steps of attention, made ahead of calls.

    mask: (m, n) of float32, added to the scores, or None. `is_causal` says that query i sees the
    keys up to i, which is in the mask too.
    """

    scale: float
    mask: NDArray[np.float32] | None
    is_causal: bool


def terms_of(workload: Workload) -> AttentionTerms:
    """Return the terms of a workload.

    Libraries align `causal` at the first key, kernels at the last: they are the same where there
    are as many queries as keys.
    """
    problem, rows = workload.problem, workload.rows
    scale = float(workload.operands["scale"][0]) if "scale" in workload.operands else 1.0
    add = workload.operands.get("add")
    mask = None if add is None else add.astype(np.float32)
    # The only row sees all keys.
    hides = rows > 1 and any(step.kind.hides for step in problem.epilogue.steps)
    is_causal = hides and mask is None and rows == problem.n
    if hides:
        seen = np.tri(rows, problem.n, problem.n - rows, dtype=bool)
        mask = np.where(seen, np.float32(0) if mask is None else mask, np.float32(-np.inf))
    return AttentionTerms(scale=scale, mask=mask, is_causal=is_causal)


def heads_of(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    """Return matrices as one batch of one head each, in place."""
    return [one[np.newaxis, np.newaxis] for one in arrays]


def check_float32(name: str, problem: Problem) -> None:
    """Check that attention is of float32.

    Raises:
        BaselineMissing: it is not.
    """
    if problem.types != F32:
        raise BaselineMissing(
            f"attention by {name} is called in float32 only, not in {problem.types.text}; "
            "choose another baseline."
        )
