"""All layers of a model are tuned within a time, and those that come later are told."""

import pytest
from linear_parts import K, N

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.layers.limited import LimitedSource, within
from gemm_tuner.layers.sources import HasSources, Source
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer


class _Source:
    """Takes two seconds more than its budget for each layer, by a clock of its own."""

    text: str | None = "sqlite:///a"

    def __init__(self) -> None:
        self.now_s = 100.0
        self.budgets: list[float] = []

    def find(self, wanted: WantedLayer) -> FoundLayer:
        return FoundLayer(kernels=(), reasons=(f"{wanted.n}",))

    def choices(self, wanted: WantedLayer) -> list[FoundLayer]:
        return [self.find(wanted)]

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        assert is_quiet
        self.budgets.append(budget_s)
        self.now_s += budget_s * len(wanted.rows) + 2
        if wanted.rows == (7,):
            raise StoreFailed("the disk is full")


def _wanted(*rows: int) -> WantedLayer:
    return WantedLayer(n=N, k=K, rows=rows, dtype="f32", epilogue="none", threads=1)


def test_no_layer_is_tuned_once_the_time_is_spent() -> None:
    source = _Source()
    limited = LimitedSource(source, 30.0, clock=lambda: source.now_s)

    limited.tune(_wanted(1), 10.0, is_quiet=True)  # 12 s
    with pytest.raises(StoreFailed):  # which took its time as well
        limited.tune(_wanted(7), 4.0, is_quiet=True)  # 6 s
    limited.tune(_wanted(1, 2, 3), 10.0, is_quiet=True)  # what is left for each
    with pytest.raises(InvalidSetting, match="the 30 s of total_budget_s were spent"):
        limited.tune(_wanted(4), 10.0, is_quiet=True)

    assert source.budgets == [10.0, 4.0, 4.0]
    assert limited.find(_wanted(1)).reasons == (f"{N}",)
    assert [one.reasons for one in limited.choices(_wanted(1))] == [(f"{N}",)]
    assert limited.text == "sqlite:///a"


def test_a_limit_is_a_source_and_keeps_what_it_can() -> None:
    limited = within(_Source(), 1)

    assert isinstance(limited, Source)
    assert isinstance(limited, HasSources)
    assert limited.source_text("0" * 64) is None
    source = _Source()
    assert within(source, None) is source


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "10"])
def test_a_limit_that_is_no_time_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidSetting, match="give a positive time, or None"):
        within(_Source(), wrong)
