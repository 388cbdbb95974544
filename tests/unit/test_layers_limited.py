"""All layers of a model are tuned within a time, and those that come later are told."""

import threading
from fractions import Fraction
from multiprocessing import get_context

import numpy as np
import pytest
from linear_parts import K, N

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.layers.limited import LimitedSource, within
from gemm_tuner.layers.sources import HasSources, Source
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.machine.measuring_lock import MeasuringLock, measuring


class _Source:
    """Takes two seconds more than its budget for each layer, by a clock of its own."""

    text: str | None = "sqlite:///a"

    def __init__(self, *answered: int) -> None:
        self.now_s = 100.0
        self.budgets: list[float] = []
        self.answered = answered

    def find(self, wanted: WantedLayer) -> FoundLayer:
        was_timed = any(rows in self.answered for rows in wanted.rows)
        fastest = ("onednn",) if was_timed else ()
        return FoundLayer(kernels=(), reasons=(f"{wanted.n}",), fastest=fastest)

    def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
        return [self.find(wanted)]

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        assert is_quiet
        self.budgets.append(budget_s)
        self.now_s += budget_s * len(wanted.rows) + 2
        if wanted.rows == (7,):
            raise StoreFailed("the disk is full")


def _wanted(*rows: int | str) -> WantedLayer:
    return WantedLayer(n=N, k=K, rows=rows, dtype="f32", epilogue="none", threads=1)


def test_no_layer_is_tuned_once_the_time_is_spent() -> None:
    source = _Source()
    limited = LimitedSource(source, 30.0, clock=lambda: source.now_s)

    limited.tune(_wanted(1), 10.0, is_quiet=True)  # 12 s
    with pytest.raises(StoreFailed):  # which took its time as well
        limited.tune(_wanted(7), 4.0, is_quiet=True)  # 6 s
    limited.tune(_wanted(1, 2, 3), 10.0, is_quiet=True)  # what is left for each
    with pytest.raises(InvalidSetting, match="the 30 s of total_budget_s were over before it"):
        limited.tune(_wanted(4), 10.0, is_quiet=True)

    assert source.budgets == [10.0, 4.0, 4.0]
    assert limited.find(_wanted(1)).reasons == (f"{N}",)


def test_a_wide_range_has_the_time_of_each_m_that_it_is_tuned_at() -> None:
    source = _Source()
    limited = LimitedSource(source, 34.0, clock=lambda: source.now_s)

    limited.tune(_wanted(65, "1..64"), 10.0, is_quiet=True)  # 8 m, searched and compared

    assert source.budgets == [2.0]
    assert [one.reasons for one in limited.choices(_wanted(1))] == [(f"{N}",)]
    assert limited.text == "sqlite:///a"


def test_a_limit_is_a_source_and_keeps_what_it_can() -> None:
    limited = within(_Source(), 1)

    assert isinstance(limited, Source)
    assert isinstance(limited, HasSources)
    assert limited.source_text("0" * 64) is None
    source = _Source()
    assert within(source, None) is source


@pytest.mark.parametrize(
    "time",
    [np.timedelta64(3, "s"), -(10**5000), float("nan"), "9" * 5000],
    ids=["of NumPy", "of many digits", "no number", "long text"],
)
def test_a_limit_is_a_positive_time(time: object) -> None:
    with pytest.raises(InvalidSetting, match=r"total_budget_s = .{1,100} cannot be used"):
        within(_Source(), time)


def test_nothing_is_said_of_a_limit_where_all_is_answered() -> None:
    source = _Source(1, 2)
    limited = LimitedSource(source, 3.0, clock=lambda: source.now_s)
    limited.tune(_wanted(4), 10.0, is_quiet=True)

    limited.tune(_wanted(1, 2), 10.0, is_quiet=True)
    with pytest.raises(InvalidSetting, match="total_budget_s"):
        limited.tune(_wanted(1, 2, 3), 10.0, is_quiet=True)

    assert len(source.budgets) == 1


def test_waiting_for_whoever_measures_ends_with_the_limit() -> None:
    class Measuring(_Source):
        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
            with measuring():
                super().tune(wanted, budget_s, is_quiet=is_quiet)

    source, other = Measuring(), MeasuringLock()
    assert other.acquire()
    over = r"200 ms of total_budget_s are over: .*waiting for another thread.*; give more"
    with pytest.raises(InvalidSetting, match=over):
        within(source, 0.2).tune(_wanted(1), 10.0, is_quiet=True)
    other.release()

    assert not source.budgets


def test_a_forked_child_tunes_while_its_parent_does() -> None:
    tunes, ends = threading.Event(), threading.Event()

    class Slow(_Source):
        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
            if wanted.rows == (1,):
                tunes.set()
                ends.wait(20)
            else:
                super().tune(wanted, budget_s, is_quiet=is_quiet)

    limited, quiet = within(Slow(), 1000.0), {"is_quiet": True}
    thread = threading.Thread(target=limited.tune, args=(_wanted(1), 1.0), kwargs=quiet)
    thread.start()
    assert tunes.wait(10)

    child = get_context("fork").Process(target=limited.tune, args=(_wanted(2), 1.0), kwargs=quiet)
    child.start()
    child.join(10)
    is_done = child.exitcode == 0
    child.kill()
    child.join()
    ends.set()
    thread.join()
    assert is_done


@pytest.mark.parametrize(
    "time",
    [
        np.float32(3),
        np.int64(3),
        Fraction(1, 2),
        1e9,
        pytest.param(10**400, id="huge"),
        float("inf"),
    ],
)
def test_any_positive_number_is_a_limit(time: float) -> None:
    source = _Source()
    within(source, time).tune(_wanted(1), 0.25, is_quiet=True)
    assert source.budgets == [0.25]


@pytest.mark.parametrize(
    "wrong", [0, -1, float("nan"), pytest.param(-(10**400), id="huge"), True, "10"]
)
def test_a_limit_that_is_no_time_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidSetting, match="give a positive time, or None"):
        within(_Source(), wrong)
