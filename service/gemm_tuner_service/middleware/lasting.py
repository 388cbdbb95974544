"""Answers that last: they wait for something, and may take longer than others."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from starlette.types import Scope

from gemm_tuner_service.clients.client_limits import Work
from gemm_tuner_service.middleware.limits import LEAVE

WORK = "work"  # the member of the state of a request that counts its work

_LASTING = "lasting"
_IS_LEFT = "is left"  # nobody waits for the answer any more
_TO_ANSWER_S = 10.0  # after the waiting


class Lasting:
    """A request that may wait for so many seconds, and is woken when there is something to do.

    It ends before its time when its caller leaves, or the service ends.
    """

    def __init__(self, seconds: float) -> None:
        self._until_s = time.monotonic() + seconds
        self._woken = asyncio.Event()
        self._is_ended = False

    @property
    def rest_s(self) -> float:
        """Return how many seconds it may still wait, 0 if it is to end."""
        return 0.0 if self._is_ended else max(0.0, self._until_s - time.monotonic())

    @property
    def connection_rest_s(self) -> float:
        """Return how many seconds its connection may still be without a whole answer."""
        return max(0.0, self._until_s + _TO_ANSWER_S - time.monotonic())

    def wake(self) -> None:
        """Let it look at once."""
        self._woken.set()

    def end(self) -> None:
        """Let it answer with what there is."""
        self._is_ended = True
        self.wake()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until it is woken or its time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, self.rest_s)):
                await self._woken.wait()
        self._woken.clear()


def let_last(scope: Scope, seconds: float) -> Lasting:
    """Let the request of a scope wait for so long: it leaves its place to others meanwhile.

    Raises:
        TooManyRequests: too many wait already.
    """
    state = scope["state"]
    cast("Work", state[WORK]).wait()
    state[LEAVE]()
    lasting = state[_LASTING] = Lasting(seconds)
    if _IS_LEFT in state:  # before it began to wait
        lasting.end()
    return lasting


def end_lasting(scope: Mapping[str, Any] | None) -> None:
    """End the waiting of a request, whether it has begun or not."""
    if scope is not None and "state" in scope:
        scope["state"][_IS_LEFT] = True
    if (lasting := lasting_of(scope)) is not None:
        lasting.end()


def lasting_of(scope: Mapping[str, Any] | None) -> Lasting | None:
    """Return the request of a scope if it is one that lasts."""
    state = {} if scope is None else scope.get("state", {})
    return cast("Lasting | None", state.get(_LASTING))
