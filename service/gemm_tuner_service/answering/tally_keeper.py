"""Tallies in memory: pages that are asked for again and again wait for no counting.

What is older than `KEPT_S` is counted anew, if verdicts changed, beside the pages, which have the
older meanwhile.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from threading import Lock

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.machine.urgency import lower_urgency
from gemm_tuner.store.tallies import Counting, Tallies

KEPT_S = 5.0
LONGEST_S = 60.0  # a page waits for a new count where its own is older
NICENESS = 10  # of the thread that counts: who asks gets nine tenths of a core that both share
PATIENCE_S = 0.1  # so long at most; then it has the older, with its time
SOON_S = 0.05  # is a small store counted
START_S = 2.0  # so long at most does the start of a service wait for its first count
MAX_KEPT = 64

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What was counted, and when, where that is so long ago that a page tells it."""

    tallies: Tallies
    old_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    tallies: Tallies
    at_s: float  # nothing is known to have changed since
    at: datetime
    state: object | None  # of the database before the count


class TallyKeeper:
    """Keeps what was counted, of all CPUs and of some; of all it counts when it begins.

    `state` returns what stays the same while verdicts do, and None where that is not known.
    """

    def __init__(
        self,
        counting: Counting,
        state: Callable[[], object | None] = lambda: None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counting = counting
        self._state = state
        self._now_s = now_s
        self._lock = Lock()
        self._kept: OrderedDict[str | None, _Kept] = OrderedDict()
        self._being_counted: dict[str | None, Future[Tallies]] = {}
        # The database counts: a thread that waits for a core seldom has Python's lock meanwhile.
        self._counter = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="tallies",
            initializer=lower_urgency,
            initargs=(NICENESS,),
        )
        with self._lock:
            self._first = self._begin(None)

    def wait_for_first(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for the first count, for `START_S` at most, whether or not it can be made.

        `meanwhile` is done if there is time for it.
        """
        if wait([self._first], timeout=SOON_S).not_done:
            meanwhile()
            wait([self._first], timeout=START_S)

    def counted(self, cpu_key: str | None = None) -> Counted:
        """Return what is counted, of one CPU or of all.

        Raises:
            StoreFailed: the database does not answer, or is damaged.
        """
        state = self._state()
        with self._lock:
            known = self._kept.get(cpu_key)
            if known and state is not None and state == known.state:
                known = self._kept[cpu_key] = replace(known, at_s=self._now_s())
            age_s = self._now_s() - known.at_s if known else inf
            if known and age_s < KEPT_S:
                return Counted(tallies=known.tallies)
            counting = self._begin(cpu_key)
        if known is None:
            return Counted(tallies=counting.result())
        if age_s < LONGEST_S:
            return Counted(tallies=known.tallies)
        try:
            return Counted(tallies=counting.result(timeout=PATIENCE_S))
        except TimeoutError:
            return Counted(tallies=known.tallies, old_at=known.at)

    def close(self) -> None:
        """Count no more."""
        self._counter.shutdown(cancel_futures=True)

    def _begin(self, cpu_key: str | None) -> Future[Tallies]:
        counting = self._being_counted.get(cpu_key)
        if counting is None:
            counting = self._being_counted[cpu_key] = self._counter.submit(self._count, cpu_key)
        return counting

    def _count(self, cpu_key: str | None) -> Tallies:
        try:
            # Before the query: what changes meanwhile shows later.
            at_s, at, state = self._now_s(), datetime.now(UTC), self._state()
            tallies = self._counting.tallies(cpu_key)
        except GemmTunerError as error:  # who waits for it is told, and else the next who asks
            _LOGGER.info("verdicts were not counted: %s", error)
            raise
        finally:
            with self._lock:
                del self._being_counted[cpu_key]
        with self._lock:
            self._kept[cpu_key] = _Kept(tallies=tallies, at_s=at_s, at=at, state=state)
            self._kept.move_to_end(cpu_key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return tallies
