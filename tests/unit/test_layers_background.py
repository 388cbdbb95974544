"""Layers that are tuned while a model runs: each once, whatever fails."""

import threading

import numpy as np
import pytest
from linear_parts import K, N

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.layers.background import BackgroundTuning
from gemm_tuner.layers.sources import check_tuning
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer


class _Source:
    """Notes what it is to tune, and fails for an odd number of rows."""

    text: str | None = None

    def __init__(self) -> None:
        self.tuned: list[WantedLayer] = []
        self.may_end = threading.Event()

    def find(self, wanted: WantedLayer) -> FoundLayer:
        raise NotImplementedError

    def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
        raise NotImplementedError

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        assert self.may_end.wait(30)
        assert (budget_s, is_quiet) == (2.5, True)
        self.tuned.append(wanted)
        if wanted.rows == (1,):
            raise StoreFailed("the disk is full")
        if wanted.rows == (3,):
            raise ZeroDivisionError


def _wanted(rows: int) -> WantedLayer:
    return WantedLayer(n=N, k=K, rows=(rows,), dtype="f32", epilogue="none", threads=1)


def _wait_for(tuning: BackgroundTuning) -> None:
    for _ in range(1000):
        if not tuning.waiting:
            return
        threading.Event().wait(0.01)
    raise AssertionError(tuning.waiting)


def test_layers_are_tuned_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    source = _Source()
    tuning = BackgroundTuning(source, 2.5)

    for rows in (1, 2, 1, 3, 4):
        tuning.add(_wanted(rows))
    assert [one.rows for one in tuning.waiting] == [(1,), (2,), (3,), (4,)]
    source.may_end.set()
    _wait_for(tuning)

    assert [one.rows for one in source.tuned] == [(1,), (2,), (3,), (4,)]
    assert "the disk is full" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    tuning.add(_wanted(5))
    _wait_for(tuning)
    assert source.tuned[-1] == _wanted(5)


def test_what_waits_is_forgotten_where_it_is_stopped() -> None:
    source = _Source()
    tuning = BackgroundTuning(source, 2.5)
    for rows in (2, 4, 6):
        tuning.add(_wanted(rows))

    tuning.stop()
    source.may_end.set()
    _wait_for(tuning)

    assert len(source.tuned) <= 1


def test_a_forked_child_has_nothing_that_waits() -> None:
    source = _Source()
    tuning = BackgroundTuning(source, 2.5)
    tuning.add(_wanted(2))

    tuning.after_fork()

    assert tuning.waiting == ()
    source.may_end.set()


@pytest.mark.parametrize(
    ("tune", "budget_s", "reason"),
    [
        ("later", 1.0, "use one of: never, background, wait"),
        (None, 1.0, "is not known"),
        ("wait", -1, "positive"),
        ("wait", "10", "positive"),
        ("never", float("nan"), "positive"),
        ("wait", 10**400, "budget_s = 1(0){59}\\.\\.\\. cannot be used; give a positive"),
        pytest.param("wait", 10**5000, "budget_s = a long int cannot be used", id="long time"),
        pytest.param(10**5000, 1.0, "tune = a long int is not known", id="long name"),
        ("wait", np.timedelta64(3, "s"), "positive"),
    ],
)
def test_settings_of_tuning_are_checked(tune: object, budget_s: object, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        check_tuning(tune, budget_s)
