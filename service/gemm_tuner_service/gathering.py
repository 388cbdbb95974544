"""Questions that come while others are answered are answered together.

For all of them there is one query, and one change to a thread and back.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from anyio import to_thread

from gemm_tuner.store.verdicts import MAX_TOGETHER
from gemm_tuner_service.answers import Answer, Asked
from gemm_tuner_service.resolver import Answered

_MAX_GROUPS = 2  # at a time: one may wait for the database


class Gathering:
    """Answers the questions of one event loop with `answer_each`, in groups.

    A question that comes alone is answered at once.
    """

    def __init__(self, answer_each: Callable[[Sequence[Asked], datetime], list[Answered]]) -> None:
        self._answer_each = answer_each
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._in_progress = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, asked: Asked) -> Answer:
        """Return the bytes of the answer to a question.

        Raises:
            InvalidProblem: the problem multiplies nothing.
            StoreFailed: the database does not answer.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._in_progress < _MAX_GROUPS:
            self._in_progress += 1
            task = asyncio.create_task(self._answer_groups())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _answer_groups(self) -> None:
        try:
            while self._waiting:
                await self._answer_group()
        finally:
            # At once: who asks before the task is seen to be done must find a place for a group.
            self._in_progress -= 1

    async def _answer_group(self) -> None:
        group = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
        try:
            results: Sequence[Answered | Exception] = await to_thread.run_sync(
                self._answer_each, [asked for asked, _future in group], datetime.now(UTC)
            )
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it
            results = [error] * len(group)
        for (_asked, future), result in zip(group, results, strict=True):
            if future.done():  # who asked has left
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
