"""What the tests of layers for NumPy have in common: weights, a source, and what is right."""

import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from served import PROBLEM

from gemm_tuner.layers.linear import Linear
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.machine.urgency import start_session
from gemm_tuner.runtime.load import Kernel

Array = NDArray[Any]

M, N, K = PROBLEM.m.high, PROBLEM.n, PROBLEM.k
RANDOM = np.random.default_rng(31)
W = RANDOM.standard_normal((N, K), np.float32)
BIAS = RANDOM.standard_normal(N, np.float32)
OURS = "gemm-tuner"


@dataclass
class Kernels:
    """A source that has the kernel of `PROBLEM` once it was tuned."""

    kernel: Kernel
    is_tuned: bool = False
    may_end: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    asked: list[WantedLayer] = field(default_factory=list)
    tuned: list[tuple[int | str, ...]] = field(default_factory=list)
    niceness: int = 0  # of what is started to tune
    text: str | None = None

    def find(self, wanted: WantedLayer) -> FoundLayer:
        self.asked.append(wanted)
        if self.error is not None and not self.tuned:
            raise self.error
        rows = [str(one) for one in wanted.rows]
        has_kernel = self.is_tuned and str(M) in rows
        lacking = [one for one in rows if one != str(M) or not has_kernel]
        return FoundLayer(
            kernels=(self.kernel,) if has_kernel else (),
            reasons=tuple(f"m = {one} has none." for one in lacking),
        )

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        return [self.find(wanted)]

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
        self.tuned.append(wanted.rows)
        with start_session(["cat"], stdin=subprocess.PIPE) as compiler:
            self.niceness = os.getpriority(os.PRIO_PROCESS, compiler.pid)
        assert self.may_end.wait(30)
        assert budget_s == 10.0
        if self.error is not None:
            raise self.error
        self.is_tuned = True


def rows_of(count: int, seed: int = 1) -> Array:
    """Return so many rows, with gaps between them."""
    made: Array = np.random.default_rng(seed).standard_normal((count, K + 3), np.float32)[:, :K]
    return made


def compute(layer: Linear, count: int, seed: int = 1) -> None:
    """Check a call, with a result of its own and into one that is given."""
    x = rows_of(count, seed)
    out = np.full((count, N + 2), np.nan, np.float32)[:, :N]
    expected = np.maximum(x.astype(np.float64) @ W.T + BIAS, 0)
    assert layer(x, out=out) is out
    for y in (layer(x), out):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
