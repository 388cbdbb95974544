"""Questions that come while others are answered are answered together.

For all of them there is one query, and one change to a thread and back. What takes long has few
threads: each more takes from the time of all others, since one at a time runs Python.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar

from anyio import CapacityLimiter, to_thread

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import StoreFailed
from gemm_tuner.select.lookup import TrialsNeeded
from gemm_tuner.store.verdicts.asking import MAX_TOGETHER
from gemm_tuner_service.answering.answers import Answer, Asked
from gemm_tuner_service.answering.resolver import Answered

_Result = TypeVar("_Result")

_MAX_GROUPS = 2  # at a time: one may wait for the database
_MAX_SLOW = 2  # as well
_LONGEST_WAIT_S = 10.0  # for a group


class Answering(Protocol):
    """What answers questions, in a thread: a `Resolver`."""

    def answer_each(
        self, asked: list[Asked], now: datetime, /, *, may_read_trials: bool
    ) -> list[Answered]:
        """Return the answers to some questions, or what is wrong with them."""
        ...

    def answer_texts(
        self,
        texts: Sequence[str],
        /,
        *,
        cpu: Cpu,
        context: ExecutionContext,
        now: datetime,
        may_read_trials: bool,
    ) -> list[Answered]:
        """Return the answers to some problems, or what is wrong with them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    asked: Asked
    future: asyncio.Future[Answer]
    patience: asyncio.TimerHandle


class Gathering:
    """Answers the questions of one event loop, in groups.

    A question that comes alone is answered at once. One for which trials must be read takes much
    longer than others, and takes turns with such questions of all callers.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        # Threads of their own: whatever else runs in threads may take all that there are.
        self._quick = CapacityLimiter(_MAX_GROUPS)
        self._slow = CapacityLimiter(_MAX_SLOW)
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
            answered = await self._answer_slowly(asked)
        if isinstance(answered, Exception):
            raise answered
        return answered

    async def answer_texts(
        self, texts: Sequence[str], *, cpu: Cpu, context: ExecutionContext
    ) -> list[Answered]:
        """Return the answer to each problem of a batch, or what is wrong with it.

        Raises:
            StoreFailed: the database does not answer.
        """
        quickly = partial(
            self._answering.answer_texts,
            texts,
            cpu=cpu,
            context=context,
            now=datetime.now(UTC),
            may_read_trials=False,
        )
        answered = await to_thread.run_sync(quickly)
        return [
            await self._answer_slowly(Asked.of(Problem.parse(text), cpu, context))
            if isinstance(one, TrialsNeeded)
            else one
            for text, one in zip(texts, answered, strict=True)
        ]

    async def run_slowly(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of what reads trials, in turn with other such work."""
        return await to_thread.run_sync(work, limiter=self._slow)

    async def _answer_slowly(self, asked: Asked) -> Answered:
        answer_each, now = self._answering.answer_each, datetime.now(UTC)
        [answered] = await self.run_slowly(partial(answer_each, [asked], now, may_read_trials=True))
        return answered

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
            asked = [one.asked for one in group]
            results = await to_thread.run_sync(self._answer_quickly, asked, limiter=self._quick)
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
