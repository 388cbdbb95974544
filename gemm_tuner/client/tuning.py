"""Having a problem tuned by the service: asking for the job, and following it to its end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from threading import Event
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemm_tuner.client.connection import Deadline
from gemm_tuner.client.transport import Session
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.printable import quoted
from gemm_tuner.errors import InvalidSetting, ServiceFailed, ServiceUnreachable

TUNE_TIMEOUT_S = 60.0
LONGEST_TUNE_S = 3600.0

_FIRST_PAUSE_S = 0.1
_PAUSE_GROWS = 1.5
_LONGEST_PAUSE_S = 1.0  # of somebody who waits
_LEAST_LOOK_S = 0.5  # the last look has its moment too: the job may have come to its end

# Begins an ask, or raises `ServiceUnreachable`.
Begin = Callable[[], Session]

_Document = TypeVar("_Document", bound=BaseModel)


class Tune(StrEnum):
    """What to do about a problem that is not tuned."""

    NEVER = "never"
    BACKGROUND = "background"  # have it tuned, and compute with a library until then
    WAIT = "wait"  # have it tuned, and wait for that

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the member of this name.

        Raises:
            InvalidSetting: there is none.
        """
        try:
            return cls(text)
        except ValueError:
            raise InvalidSetting(
                f"tune = {text!r} is not known; use 'never', 'background' or 'wait'."
            ) from None


def check_tune_timeout(seconds: float) -> float:
    """Return a time to wait as it was given, once it is known to be usable.

    Raises:
        InvalidSetting: it is no positive number, or longer than `LONGEST_TUNE_S`.
    """
    if not 0 < seconds <= LONGEST_TUNE_S:
        raise InvalidSetting(
            f"tune_timeout_s = {seconds!r} cannot be used; give seconds up to {LONGEST_TUNE_S:g}."
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the tuning of a problem ended for who waited: `why` is a sentence.

    Where `is_worth_asking`, the service may have another answer than before.
    """

    why: str
    is_worth_asking: bool


class _Job(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    state: JobState
    detail: Annotated[str, Field(max_length=10_000)] = ""
    has_worker: bool = True


class _Pending(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    job: _Job


class Follower:
    """Follows the job for one question, a step at a time and until a deadline.

    `first` is until when the service may be away before it has named the job.
    """

    def __init__(
        self, request: dict[str, Any], deadline: Deadline, *, first: Deadline | None = None
    ) -> None:
        self._request = request
        self._deadline = deadline
        self._first = first or Deadline(0.0)
        self._job: _Job | None = None
        self._fault = ""

    @property
    def rest_s(self) -> float:
        """Return how many seconds there are left."""
        return self._deadline.rest_s()

    def look(self, begin: Begin) -> Ended | None:
        """Ask for the job, or how it is; return None while there is something to wait for."""
        try:
            ended = self._ask(begin().within(max(self.rest_s, _LEAST_LOOK_S)))
        except ServiceUnreachable as error:
            self._fault = str(error)
            if self._job is None and self._first.rest_s() == 0:  # this is as without tuning
                return Ended(why=f"It is not being tuned: {error}", is_worth_asking=False)
            ended = None
        except ServiceFailed as error:
            return Ended(why=f"It is not being tuned: {error}", is_worth_asking=False)
        if ended is None and self.rest_s == 0:
            return Ended(why=self._why_not_yet(), is_worth_asking=False)
        return ended

    def _ask(self, session: Session) -> Ended | None:
        if self._job is None:
            document = session.tune(self._request)
            if document is None:
                return Ended(
                    why="The service has no job for it; it was tuned, or cannot be now.",
                    is_worth_asking=True,
                )
            self._job = _parse(_Pending, document).job
        else:
            self._job = _parse(_Job, session.job(self._job.id))
        self._fault = ""
        if not self._job.state.is_over:
            return None
        return Ended(
            why=f"Job {self._job.id} is {self._job.state}: {quoted(self._job.detail).rstrip('.')}.",
            is_worth_asking=self._job.state is not JobState.FAILED,
        )

    def _why_not_yet(self) -> str:
        if self._job is None:
            return f"It is not being tuned: {self._fault}"
        nobody = "" if self._job.has_worker else ", and no worker of its class of CPUs runs"
        fault = f" {self._fault}" if self._fault else ""
        return (
            f"Job {self._job.id} was not over after {self._deadline.timeout_s:g} s: it is "
            f"{self._job.state}{nobody}.{fault}"
        )


def pauses(longest_s: float) -> Iterator[float]:
    """Yield the seconds between two looks, growing up to the longest."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(longest_s, pause_s * _PAUSE_GROWS)


def wait_for_end(follower: Follower, begin: Begin, is_given_up: Event) -> Ended:
    """Return how a job ended, or that its time is up, or nobody waits any more."""
    for pause_s in pauses(_LONGEST_PAUSE_S):
        ended = follower.look(begin)
        if ended is not None:
            return ended
        if is_given_up.wait(min(pause_s, follower.rest_s)):
            return Ended(why="Nobody waits for it any more.", is_worth_asking=False)
    raise AssertionError  # pauses never end


def _parse(kind: type[_Document], content: bytes) -> _Document:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ServiceFailed(
            f"the answer about a job is not understood ({error.error_count()} faults); "
            "check the address of the service."
        ) from None
