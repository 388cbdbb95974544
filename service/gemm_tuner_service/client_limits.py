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
PER_SECOND = 4000


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


class ClientLimits:
    """How much each client may ask: `per_second` problems, and twice that at once after a pause.

    Of each, `MAX_REQUESTS_OF_CLIENT` requests with `MAX_WORK_OF_CLIENT` problems may be in
    progress, and `MAX_WORK` problems of all together.
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
        idle = next(key for key, client in self._clients.items() if not client.requests)
        del self._clients[idle]


class Work:
    """A request in progress, and how many problems it has."""

    def __init__(self, limits: ClientLimits, client: _Client) -> None:
        self._limits = limits
        self._client = client
        self._cost = 0

    def charge(self, cost: int) -> None:
        """Count `cost` problems to this request, before they are worked at.

        Raises:
            TooManyRequests: they are too many for now.
        """
        self._limits._begin_work(self._client, cost)  # noqa: SLF001 - one idea, two classes
        self._cost += cost

    def end(self) -> None:
        """Count the request no more."""
        self._limits._end(self._client, self._cost)  # noqa: SLF001
