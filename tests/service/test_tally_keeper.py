"""Counts are kept for a while, and made anew beside who asks; old ones tell their time."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event, Timer

import pytest
from gemm_tuner_service.answering import tally_keeper
from gemm_tuner_service.answering.tally_keeper import KEPT_S, LONGEST_S, TallyKeeper

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.tallies import Tallies


@dataclass
class _Counting:
    """Counts how often it was asked; it answers when it may."""

    may_answer: Event = field(default_factory=Event)
    counted: int = 0
    niceness: int = 0
    is_away: bool = False

    def tallies(self, _cpu_key: str | None = None) -> Tallies:
        assert self.may_answer.wait(30)
        self.counted += 1
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
        if self.is_away:
            raise StoreFailed("the database is away")
        return Tallies(groups=(), shapes=(), ratios=(), shares=())


@dataclass
class _Kept:
    """A keeper of counts, its clock, and the state of its database."""

    counting: _Counting = field(default_factory=_Counting)
    now_s: float = 0.0
    state: object | None = None

    def __post_init__(self) -> None:
        self.keeper = TallyKeeper(
            self.counting,  # type: ignore[arg-type]  # counts as one
            lambda: self.state,
            now_s=lambda: self.now_s,
        )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kept]:
    """Yield a keeper that may count, and whose callers have all patience."""
    monkeypatch.setattr(tally_keeper, "PATIENCE_S", 30.0)
    made = _Kept()
    made.counting.may_answer.set()
    yield made
    made.counting.may_answer.set()
    made.keeper.close()


def test_a_count_is_kept_and_made_anew_beside_who_asks(kept: _Kept) -> None:
    first = kept.keeper.counted().tallies
    kept.now_s = KEPT_S - 0.1
    assert kept.keeper.counted().tallies is first
    assert kept.counting.counted == 1

    kept.counting.may_answer.clear()
    kept.now_s = KEPT_S + 0.1
    assert kept.keeper.counted().tallies is first  # though nothing can be counted now
    kept.counting.may_answer.set()
    kept.now_s = 2 * LONGEST_S
    assert kept.keeper.counted().tallies is not first
    assert kept.counting.counted >= 2


def test_an_old_count_is_shown_with_its_time_where_a_new_one_takes_long(
    kept: _Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_keeper, "PATIENCE_S", 0.0)
    first = kept.keeper.counted()
    assert first.old_at is None
    kept.counting.may_answer.clear()
    kept.now_s = LONGEST_S + 1

    shown = kept.keeper.counted()

    assert shown.tallies is first.tallies
    assert shown.old_at is not None
    kept.counting.may_answer.set()
    monkeypatch.setattr(tally_keeper, "PATIENCE_S", 30.0)
    assert kept.keeper.counted().old_at is None


def test_who_asks_goes_before_who_counts(kept: _Kept) -> None:
    kept.keeper.counted()

    assert kept.counting.niceness > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_failure_of_a_count_is_told(kept: _Kept) -> None:
    first = kept.keeper.counted()
    kept.counting.is_away = True
    kept.now_s = LONGEST_S + 1

    with pytest.raises(StoreFailed, match="away"):
        kept.keeper.counted()

    kept.counting.is_away = False
    assert kept.keeper.counted() == first


def test_what_did_not_change_is_not_counted_again(kept: _Kept) -> None:
    kept.keeper.counted()
    kept.state = "of today"
    kept.now_s = 2 * LONGEST_S
    second = kept.keeper.counted()

    kept.now_s *= 10
    assert kept.keeper.counted() == second
    assert kept.counting.counted == 2

    kept.state = "of tomorrow"
    kept.now_s *= 10
    kept.keeper.counted()
    assert kept.counting.counted == 3


def test_a_start_waits_for_the_first_count_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = _Kept()
    monkeypatch.setattr(tally_keeper, "START_S", 0.01)
    slow.keeper.wait_for_first()
    assert slow.counting.counted == 0

    monkeypatch.setattr(tally_keeper, "START_S", 30.0)
    Timer(0.01, slow.counting.may_answer.set).start()
    slow.keeper.wait_for_first()
    assert slow.counting.counted == 1
    slow.keeper.close()


@pytest.mark.parametrize("is_slow", [False, True])
def test_while_a_start_waits_long_something_else_is_done(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    kept = _Kept()
    monkeypatch.setattr(tally_keeper, "SOON_S", 0.0 if is_slow else 30.0)
    done = []

    def do() -> None:
        done.append(kept.counting.counted)
        kept.counting.may_answer.set()

    if not is_slow:
        kept.counting.may_answer.set()
    kept.keeper.wait_for_first(meanwhile=do)

    assert done == ([0] if is_slow else [])
    assert kept.counting.counted == 1
    kept.keeper.close()
