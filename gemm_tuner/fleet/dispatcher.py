"""Placing jobs: each row that waits becomes a task, as long as there are workers for it.

What a task came to is read from its row. One that was lost with its worker, or with the scheduler,
leaves a row that waits again, and gets another task.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gemm_tuner.domain.spans import is_within
from gemm_tuner.errors import StoreFailed
from gemm_tuner.fleet.engine import Engine, Placed
from gemm_tuner.fleet.library import SchedulerUnreachable
from gemm_tuner.fleet.task import run_job
from gemm_tuner.store.jobs.jobs import Jobs

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# A job that comes back after so long had a cause of its own.
_FORGOTTEN = timedelta(seconds=2 * _LONGEST_PAUSE_S)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Pause:
    """How often in a row something came back, and for how long it is let be."""

    tries: int
    since: datetime
    pause: timedelta

    def lasts(self, now: datetime) -> bool:
        return is_within(now, self.since, self.pause)

    def is_remembered(self, now: datetime) -> bool:
        return is_within(now, self.since, self.pause + _FORGOTTEN)

    def next(self, now: datetime) -> "_Pause":
        tries = self.tries + 1 if self.is_remembered(now) else 1
        pause_s = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S)
        return _Pause(tries, now, timedelta(seconds=pause_s))


_NONE = _Pause(0, _LONG_AGO, timedelta(0))


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """Places jobs of one database by an engine that `connect` returns, through outages of both.

    `tell` takes a line for people. Several dispatchers may work at once: a task whose job another
    worker runs, or that is over, ends at once.
    """

    jobs: Jobs
    connect: Callable[[], Engine]
    tell: Callable[[str], None]
    now: Callable[[], datetime] = field(default_factory=lambda: _now)
    task: Callable[[str], Any] = run_job
    _engine: Engine | None = field(default=None, init=False)
    _placed: dict[str, tuple[str, Placed]] = field(default_factory=dict, init=False)
    _resting: dict[str, _Pause] = field(default_factory=dict, init=False)  # by the id of a job
    _outage: _Pause = field(default=_NONE, init=False)
    _is_cut_off: bool = field(default=False, init=False)

    def step(self) -> None:
        """Place what waits and can be placed now; it returns soon, and is called again and again.

        While the scheduler or the database does not answer, it does nothing, and says so once.
        """
        now = self.now()
        if self._outage.lasts(now):
            return
        try:
            self._place(self._connected(), now)
        except (SchedulerUnreachable, StoreFailed) as error:
            if isinstance(error, SchedulerUnreachable):
                self.close()
            if not self._is_cut_off:
                self.tell(f"Waiting until it can go on: {error}")
            self._is_cut_off = True
            self._outage = self._outage.next(now)
            return
        if self._is_cut_off:
            self.tell("It goes on.")
        self._is_cut_off = False
        self._outage = _NONE

    def close(self) -> None:
        """Let go of the engine. Jobs that run go on, since workers hold them, not tasks."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self._placed.clear()

    def _connected(self) -> Engine:
        if self._engine is None:
            self._engine = self.connect()
        return self._engine

    def _place(self, engine: Engine, now: datetime) -> None:
        self._collect(now)
        for class_key, places in sorted(engine.places().items()):
            busy = sum(1 for key, _task in self._placed.values() if key == class_key)
            if busy >= places:
                continue
            but = self._placed.keys() | {k for k, one in self._resting.items() if one.lasts(now)}
            for job_id in self.jobs.ready(class_key, now, limit=places - busy, but=but):
                names = self.jobs.names_for(job_id, now)
                placed = engine.place(self.task, job_id, class_key=class_key, names=names)
                self._placed[job_id] = (class_key, placed)

    def _collect(self, now: datetime) -> None:
        """Forget the tasks that ended. Whose job still waits then rests for a while."""
        for job_id in [key for key, (_class, task) in self._placed.items() if task.done()]:
            del self._placed[job_id]
            self._resting[job_id] = self._resting.get(job_id, _NONE).next(now)
        for job_id, pause in tuple(self._resting.items()):
            if not pause.is_remembered(now):
                del self._resting[job_id]
