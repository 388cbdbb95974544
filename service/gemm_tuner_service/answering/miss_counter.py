"""Counting questions that have no measured answer, without keeping an answer waiting."""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from threading import Event, Lock, Thread

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.store.jobs.misses import Miss
from gemm_tuner_service.answering.answers import Asked, Key

WRITE_EVERY_S = 5.0
MAX_COUNTED = 4096  # questions between two writings; others are not counted

_LOGGER = logging.getLogger(__name__)


class MissCounter:
    """Counts in memory, and hands the counts to `write` in a thread, every `WRITE_EVERY_S`.

    What cannot be written is not counted: misses are a hint, and no answer fails for them.
    """

    def __init__(self, write: Callable[[Mapping[Miss, int], datetime], None]) -> None:
        self._write = write
        self._lock = Lock()
        self._counts: dict[Key, tuple[Asked, int]] = {}
        self._is_closing = Event()
        self._is_failing = False
        self._thread = Thread(target=self._run, name="gemm-tuner-misses", daemon=True)
        self._thread.start()

    def note(self, asked: Asked) -> None:
        """Count a question."""
        with self._lock:
            known = self._counts.get(asked.key)
            if known is not None:
                self._counts[asked.key] = (asked, known[1] + 1)
            elif len(self._counts) < MAX_COUNTED:
                self._counts[asked.key] = (asked, 1)

    def flush(self) -> None:
        """Write what was counted."""
        with self._lock:
            counted, self._counts = self._counts, {}
        if not counted:
            return
        misses: dict[Miss, int] = {}
        for asked, count in counted.values():
            miss = Miss(problem=asked.problem, class_key=asked.cpu.class_key, context=asked.context)
            misses[miss] = misses.get(miss, 0) + count
        try:
            self._write(misses, datetime.now(UTC))
        except GemmTunerError as error:
            if not self._is_failing:
                _LOGGER.warning("questions without a measured answer are not counted: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._is_closing.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._is_closing.wait(WRITE_EVERY_S):
            self.flush()
