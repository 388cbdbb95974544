"""Tallies in memory: pages that are asked for again and again wait for no counting.

What is older than `KEPT_S` is counted anew beside the pages, which have the older meanwhile.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.store.tallies import Counting, Tallies

KEPT_S = 5.0
LONGEST_S = 60.0  # what is older than this is not shown
MAX_KEPT = 64

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Counted:
    at_s: float
    tallies: Tallies


class TallyKeeper:
    """Keeps what was counted, of all CPUs and of some; of all it counts when it begins."""

    def __init__(self, counting: Counting, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._counting = counting
        self._now_s = now_s
        self._lock = Lock()
        self._kept: OrderedDict[str | None, _Counted] = OrderedDict()
        self._being_counted: dict[str | None, Future[Tallies]] = {}
        self._counter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tallies")
        with self._lock:
            self._begin(None)

    def tallies(self, cpu_key: str | None = None) -> Tallies:
        """Return what is counted, of one CPU or of all.

        Raises:
            StoreFailed: the database does not answer, or is damaged.
        """
        with self._lock:
            known = self._kept.get(cpu_key)
            age_s = self._now_s() - known.at_s if known else float("inf")
            if known and age_s < KEPT_S:
                return known.tallies
            counting = self._begin(cpu_key)
        return known.tallies if known and age_s < LONGEST_S else counting.result()

    def close(self) -> None:
        """Count no more."""
        self._counter.shutdown(cancel_futures=True)

    def _begin(self, cpu_key: str | None) -> Future[Tallies]:
        counting = self._being_counted.get(cpu_key)
        if counting is None:
            counting = self._being_counted[cpu_key] = self._counter.submit(self._count, cpu_key)
        return counting

    def _count(self, cpu_key: str | None) -> Tallies:
        at_s = self._now_s()  # before the query: what changes meanwhile shows later
        try:
            tallies = self._counting.tallies(cpu_key)
        except GemmTunerError as error:  # who waits for it is told, and else the next who asks
            _LOGGER.info("verdicts were not counted: %s", error)
            raise
        finally:
            with self._lock:
                del self._being_counted[cpu_key]
        with self._lock:
            self._kept[cpu_key] = _Counted(at_s, tallies)
            self._kept.move_to_end(cpu_key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return tallies
