"""Asking for many problems on several classes of CPUs, and following them to their end."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.spans import is_within
from gemm_tuner.store.jobs.jobs import Jobs, JobsFull
from gemm_tuner.store.jobs.views import JobViews

_IN_FLIGHT = 200  # others ask for jobs too, and what was not asked for need not be cancelled
_CANCEL_EVERY = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem to be tuned for CPUs of a class."""

    problem: Problem
    class_key: str
    context: ExecutionContext


def _now() -> datetime:
    return datetime.now(UTC)


class Spread:
    """Jobs for some questions: a part of them is asked for at a time, until all are over.

    What somebody else asked for already is the same job, and is not cancelled by `stop`.
    """

    def __init__(
        self,
        jobs: Jobs,
        views: JobViews,
        questions: Iterable[Question],
        *,
        budget_s: float,
        owner: str,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._jobs = jobs
        self._views = views
        self._budget_s = budget_s
        self._owner = owner
        self._now = now
        self._to_ask = deque(dict.fromkeys(questions))
        self._count = len(self._to_ask)
        self._in_flight: dict[str, Question] = {}  # by the id of a job
        self._own: set[str] = set()
        self._last: dict[str, Job] = {}
        self._over: dict[Question, Job] = {}
        self._began_at = now()
        self._is_stopped = False
        self._cancelled_at = datetime.min.replace(tzinfo=UTC)

    @property
    def is_over(self) -> bool:
        """Return whether all jobs are, that are to be waited for."""
        waited_for = self._own & self._in_flight.keys() if self._is_stopped else self._in_flight
        return not waited_for and (self._is_stopped or not self._to_ask)

    @property
    def over(self) -> Mapping[Question, Job]:
        """Return the jobs that are over, by their questions."""
        return self._over

    @property
    def count(self) -> int:
        """Return how many questions there are."""
        return self._count

    def running(self) -> int:
        """Return how many jobs run, as far as it is known."""
        return sum(job.state is JobState.RUNNING for job in self._last.values())

    def stop(self) -> None:
        """Ask for no more, and cancel what nobody else asked for; what runs keeps its best."""
        self._is_stopped = True

    def step(self) -> None:
        """Ask for more, and read what came out since.

        Raises:
            StoreFailed: the database does not answer; a later step goes on.
        """
        if self._is_stopped:
            self._cancel()
        else:
            self._ask()
        found = self._views.several(tuple(self._in_flight))
        self._last = {key: job for key, job in found.items() if isinstance(job, Job)}
        for job_id, question in tuple(self._in_flight.items()):
            job = self._last.get(job_id)
            if job is None or self._is_taken_away(job):  # or deleted by hand, or damaged
                del self._in_flight[job_id]
                self._to_ask.append(question)  # it is asked for again
            elif job.state.is_over:
                del self._in_flight[job_id], self._last[job_id]
                self._over[question] = job

    def _is_taken_away(self, job: Job) -> bool:
        """Return whether another cancelled a job of theirs, which is still wanted here."""
        is_own = job.id in self._own
        return job.state is JobState.CANCELLED and not is_own and not self._is_stopped

    def seconds_left(self, places: Mapping[str, int]) -> float:
        """Return about how long it takes still, with so many workers for each class of CPUs.

        A class goes on as fast as it went until now; before its first end, a job takes its budget,
        or as long as it was waited for until now.
        """
        spent_s = (self._now() - self._began_at).total_seconds()
        left = Counter(one.class_key for one in (*self._to_ask, *self._in_flight.values()))
        done = Counter(question.class_key for question in self._over)
        first_s = max(self._budget_s, spent_s)
        return max(
            (
                count * (spent_s / done[key] if done[key] else first_s / places.get(key, 1))
                for key, count in left.items()
            ),
            default=0.0,
        )

    def _ask(self) -> None:
        while self._to_ask and len(self._in_flight) < _IN_FLIGHT:
            question = self._to_ask[0]
            try:
                job, is_new = self._jobs.submit(
                    question.problem,
                    class_key=question.class_key,
                    context=question.context,
                    budget_s=self._budget_s,
                    priority=0,
                    owner=self._owner,
                    idempotency_key=None,
                    now=self._now(),
                )
            except JobsFull:
                return  # until some are over
            self._to_ask.popleft()
            self._in_flight[job.id] = question
            if is_new:
                self._own.add(job.id)

    def _cancel(self) -> None:
        """Cancel own jobs, again and again: one whose worker was lost ends only so."""
        now = self._now()
        if is_within(now, self._cancelled_at, _CANCEL_EVERY):
            return
        self._cancelled_at = now
        for job_id in self._own & self._in_flight.keys():
            self._jobs.cancel(job_id, now)
