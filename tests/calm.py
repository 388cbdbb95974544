"""A machine that looks calm to a sweep, whatever else runs beside a test."""

from math import inf

import pytest

from gemm_tuner.cli import bench
from gemm_tuner.domain import doubt
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.tuning import context_sweep, finished


def let_nothing_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps of this process believe what they measure beside other tests, and settle it."""

    def why_disturbed(_measurement: Measurement) -> None:
        return None

    for module in (doubt, context_sweep):
        monkeypatch.setattr(module, "why_disturbed", why_disturbed)
    for module, widest in ((finished, "_WIDE"), (bench, "_WIDEST_INTERVAL")):
        monkeypatch.setattr(module, widest, inf)
