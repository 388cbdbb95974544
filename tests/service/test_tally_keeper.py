"""Counts are kept for a while, then made anew beside who asks, and not shown when they are old."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

import pytest
from gemm_tuner_service.tally_keeper import KEPT_S, LONGEST_S, TallyKeeper

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.tallies import Tallies


@dataclass
class _Counting:
    """Counts how often it was asked; it answers when it may."""

    may_answer: Event = field(default_factory=Event)
    counted: int = 0
    is_away: bool = False

    def tallies(self, _cpu_key: str | None = None) -> Tallies:
        assert self.may_answer.wait(30)
        self.counted += 1
        if self.is_away:
            raise StoreFailed("the database is away")
        return Tallies(groups=(), shapes=(), ratios=(), shares=())


@pytest.fixture
def counting() -> Iterator[_Counting]:
    made = _Counting()
    yield made
    made.may_answer.set()


def test_a_count_is_kept_and_made_anew_beside_who_asks(counting: _Counting) -> None:
    clock = [0.0]
    keeper = TallyKeeper(counting, now_s=lambda: clock[0])  # type: ignore[arg-type]  # counts as one
    counting.may_answer.set()
    first = keeper.tallies()
    clock[0] = KEPT_S - 0.1
    assert keeper.tallies() is first
    assert counting.counted == 1

    counting.may_answer.clear()
    clock[0] = KEPT_S + 0.1
    assert keeper.tallies() is first  # though nothing can be counted now
    counting.may_answer.set()
    clock[0] = 2 * LONGEST_S
    assert keeper.tallies() is not first
    assert counting.counted >= 2
    keeper.close()


def test_an_old_count_is_not_shown_and_a_failure_is(counting: _Counting) -> None:
    clock = [0.0]
    keeper = TallyKeeper(counting, now_s=lambda: clock[0])  # type: ignore[arg-type]  # counts as one
    counting.may_answer.set()
    first = keeper.tallies()

    clock[0] = LONGEST_S + 1
    second = keeper.tallies()
    counting.is_away = True
    clock[0] *= 2
    clock[0] += 1

    assert second is not first
    with pytest.raises(StoreFailed, match="away"):
        keeper.tallies()
    counting.is_away = False
    assert keeper.tallies() == first
    keeper.close()
