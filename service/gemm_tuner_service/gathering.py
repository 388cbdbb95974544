"""Questions that come while others are answered are answered together.

For all of them there is one query, and one change to a thread and back.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from anyio import to_thread

from gemm_tuner.errors import StoreFailed
from gemm_tuner.select.lookup import TrialsNeeded
from gemm_tuner.store.asking import MAX_TOGETHER
from gemm_tuner_service.answers import Answer, Asked
from gemm_tuner_service.resolver import Answered

_MAX_GROUPS = 2  # at a time: one may wait for the database
_LONGEST_WAIT_S = 10.0  # for a group


class Answering(Protocol):
    """What answers questions, in a thread: a `Resolver`."""

    def answer(self, asked: Asked, now: datetime, /) -> Answer:
        """Return the answer to a question, however long it takes."""
        ...

    def answer_each(
        self, asked: list[Asked], now: datetime, /, *, may_read_trials: bool
    ) -> list[Answered]:
        """Return the answers to some questions, or what is wrong with them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    asked: Asked
    future: asyncio.Future[Answer]
    patience: asyncio.TimerHandle


class Gathering:
    """Answers the questions of one event loop, in groups.

    A question that comes alone is answered at once. One for which trials must be read takes much
    longer than others, and is answered in a thread of its own.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._waiting: deque[_Waiting] = deque()
        self._in_progress = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, asked: Asked) -> Answer:
        """Return the bytes of the answer to a question.

        Raises:
            InvalidProblem: the problem multiplies nothing.
            StoreFailed: the database does not answer, or a row of it is damaged.
        """
        try:
            return await self._in_group(asked)
        except TrialsNeeded:
            return await to_thread.run_sync(self._answering.answer, asked, datetime.now(UTC))

    async def _in_group(self, asked: Asked) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        patience = loop.call_later(_LONGEST_WAIT_S, _give_up, future)
        self._waiting.append(_Waiting(asked=asked, future=future, patience=patience))
        if self._in_progress < _MAX_GROUPS:
            self._in_progress += 1
            task = asyncio.create_task(self._answer_groups())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _answer_groups(self) -> None:
        try:
            while group := self._next_group():
                await self._answer_group(group)
        finally:
            # At once: who asks before the task is seen to be done must find a place for a group.
            self._in_progress -= 1

    def _next_group(self) -> list[_Waiting]:
        """Take some who wait, without those who have left or lost patience."""
        group: list[_Waiting] = []
        while self._waiting and len(group) < MAX_TOGETHER:
            one = self._waiting.popleft()
            one.patience.cancel()
            if not one.future.done():
                group.append(one)
        return group

    async def _answer_group(self, group: list[_Waiting]) -> None:
        try:
            results = await to_thread.run_sync(self._answer_quickly, [one.asked for one in group])
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it
            results = [error] * len(group)
        for one, result in zip(group, results, strict=True):
            if one.future.done():  # who asked has left
                continue
            if isinstance(result, Exception):
                one.future.set_exception(result)
            else:
                one.future.set_result(result)

    def _answer_quickly(self, asked: list[Asked]) -> list[Answered]:
        return self._answering.answer_each(asked, datetime.now(UTC), may_read_trials=False)


def _give_up(future: asyncio.Future[Answer]) -> None:
    if not future.done():
        future.set_exception(
            StoreFailed(
                f"the database did not answer others within {_LONGEST_WAIT_S:g} s, so it was not "
                "asked; check it, and ask again later."
            )
        )
