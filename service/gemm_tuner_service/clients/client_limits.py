"""Limits for each client: how much it may ask, and how much of it may be in progress.

Work is counted in problems: a batch of 1000 costs 1000. The table of clients has a bounded size.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from threading import Lock

from gemm_tuner_service.bounds import MAX_BATCH

MAX_CLIENTS = 4096
MAX_REQUESTS_OF_CLIENT = 32
MAX_WORK_OF_CLIENT = 2 * MAX_BATCH
MAX_WORK = 4 * MAX_BATCH
MAX_WAITING_OF_CLIENT = 16
MAX_WAITING = 128
PER_SECOND = 4000

_WAITING_S = 5  # until a request that found no place to wait may find one


class TooManyRequests(Exception):
    """A client asks too much, or all together do: why, and when to ask again."""

    def __init__(self, detail: str, *, retry_after_s: int = 1, is_own_fault: bool = True) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.status = (
            HTTPStatus.TOO_MANY_REQUESTS if is_own_fault else HTTPStatus.SERVICE_UNAVAILABLE
        )


@dataclass(slots=True, kw_only=True)
class _Client:
    """A client: what it may still ask, since when, and what is in progress."""

    room: float
    at_s: float
    requests: int = 0
    work: int = 0
    waiting: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether nothing of this client is in progress or waits."""
        return not self.requests and not self.waiting


class ClientLimits:
    """How much each client may ask: `per_second` problems, and twice that at once after a pause.

    Of each, `MAX_REQUESTS_OF_CLIENT` requests with `MAX_WORK_OF_CLIENT` problems may be in
    progress, and `MAX_WORK` problems of all together. `MAX_WAITING_OF_CLIENT` requests of each may
    wait for jobs, and `MAX_WAITING` of all together: these cost little, and last.
    """

    def __init__(
        self, per_second: float = PER_SECOND, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._burst = max(2.0 * per_second, 2.0 * MAX_BATCH)
        self._now_s = now_s
        self._lock = Lock()  # routes run in threads
        self._clients = OrderedDict[str, _Client]()
        self._work = 0
        self._waiting = 0

    def __len__(self) -> int:
        """Return how many clients are remembered."""
        return len(self._clients)

    def charge(self, key: str, cost: int) -> None:
        """Count what a client asked, without work in progress.

        Raises:
            TooManyRequests: it asks too fast.
        """
        with self._lock:
            self._spend(self._client(key), cost)

    def begin(self, key: str) -> "Work":
        """Count a request of a client, until its work ends.

        Raises:
            TooManyRequests: it asks too fast, or too much of it is in progress.
        """
        with self._lock:
            client = self._client(key)
            if client.requests >= MAX_REQUESTS_OF_CLIENT:
                raise TooManyRequests(
                    f"{client.requests} requests of this client are being answered; "
                    "ask again when one is."
                )
            self._spend(client, 1)
            client.requests += 1
        return Work(self, client)

    def _begin_work(self, client: _Client, cost: int) -> None:
        with self._lock:
            if client.work + cost > MAX_WORK_OF_CLIENT:
                raise TooManyRequests(
                    f"{client.work} problems of this client are being answered, and "
                    f"{cost} more are too many; ask again when they are."
                )
            if self._work + cost > MAX_WORK:
                raise TooManyRequests(
                    f"{self._work} problems are being answered; ask again in a second.",
                    is_own_fault=False,
                )
            # The request itself was counted as one.
            self._spend(client, max(0, cost - 1))
            client.work += cost
            self._work += cost

    def _begin_to_wait(self, client: _Client) -> None:
        with self._lock:
            if client.waiting >= MAX_WAITING_OF_CLIENT:
                raise TooManyRequests(
                    f"{client.waiting} requests of this client wait for jobs; ask again when one "
                    "was answered, or ask for the job without waiting.",
                    retry_after_s=_WAITING_S,
                )
            if self._waiting >= MAX_WAITING:
                raise TooManyRequests(
                    f"{self._waiting} requests wait for jobs; ask for the job without waiting.",
                    retry_after_s=_WAITING_S,
                    is_own_fault=False,
                )
            client.waiting += 1
            self._waiting += 1

    def _end_waiting(self, client: _Client) -> None:
        with self._lock:
            client.waiting -= 1
            self._waiting -= 1

    def _end(self, client: _Client, cost: int) -> None:
        with self._lock:
            client.requests -= 1
            client.work -= cost
            self._work -= cost

    def _spend(self, client: _Client, cost: int) -> None:
        now_s = self._now_s()
        passed_s = now_s - client.at_s
        client.room = min(self._burst, client.room + passed_s * self._per_second)
        client.at_s = now_s
        if client.room < cost:
            raise TooManyRequests(
                f"this client asks for more than {self._per_second:g} problems a second.",
                retry_after_s=max(1, math.ceil((cost - client.room) / self._per_second)),
            )
        client.room -= cost

    def _client(self, key: str) -> _Client:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = _Client(room=self._burst, at_s=self._now_s())
            if len(self._clients) > MAX_CLIENTS:
                self._forget_one()
        else:
            self._clients.move_to_end(key)
        return client

    def _forget_one(self) -> None:
        """Forget the client that asked the longest ago and has nothing in progress."""
        idle = next(key for key, client in self._clients.items() if client.is_idle)
        del self._clients[idle]


class Work:
    """A request in progress, and how many problems it has; or one that waits for a job."""

    def __init__(self, limits: ClientLimits, client: _Client) -> None:
        self._limits = limits
        self._client = client
        self._cost = 0
        self._is_waiting = False

    def charge(self, cost: int) -> None:
        """Count `cost` problems to this request, before they are worked at.

        Raises:
            TooManyRequests: they are too many for now.
        """
        self._limits._begin_work(self._client, cost)  # noqa: SLF001 - one idea, two classes
        self._cost += cost

    def wait(self) -> None:
        """Count the request as one that waits, and no more as one in progress. Call it once.

        Raises:
            TooManyRequests: too many wait.
        """
        self._limits._begin_to_wait(self._client)  # noqa: SLF001
        self._limits._end(self._client, self._cost)  # noqa: SLF001
        self._is_waiting = True

    def end(self) -> None:
        """Count the request no more."""
        if self._is_waiting:
            self._limits._end_waiting(self._client)  # noqa: SLF001
        else:
            self._limits._end(self._client, self._cost)  # noqa: SLF001
