"""Tallies in memory: pages that are asked for again and again count at most every few seconds."""

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from gemm_tuner.store.tallies import Counting, Tallies

KEPT_S = 5.0
MAX_KEPT = 64


class TallyKeeper:
    """Keeps what was counted, of all CPUs and of some, for `KEPT_S`."""

    def __init__(self, counting: Counting, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._counting = counting
        self._now_s = now_s
        self._lock = Lock()  # one counts, and the others wait for the same
        self._kept: OrderedDict[str | None, tuple[float, Tallies]] = OrderedDict()

    def tallies(self, cpu_key: str | None = None) -> Tallies:
        """Return what is counted, of one CPU or of all."""
        with self._lock:
            known = self._kept.get(cpu_key)
            if known is not None and self._now_s() < known[0]:
                return known[1]
            counted = self._counting.tallies(cpu_key)
            self._kept[cpu_key] = (self._now_s() + KEPT_S, counted)
            self._kept.move_to_end(cpu_key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return counted
