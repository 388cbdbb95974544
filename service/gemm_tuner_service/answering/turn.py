"""What is looked up once for all that happens in one turn of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class OncePerTurn(Generic[_Value]):
    """Remembers a value until the next turn of the event loop, in which it is asked for.

    Nothing is older than a question for that: who asked in this turn was read from a socket in an
    earlier one, and the task of who is read in this turn runs in the next.
    """

    def __init__(self, look_up: Callable[[], _Value]) -> None:
        self._look_up = look_up
        self._known: list[_Value] = []

    def __call__(self) -> _Value:
        """Return the value."""
        if not self._known:
            self._known.append(self._look_up())
            asyncio.get_running_loop().call_soon(self._known.clear)
        return self._known[0]
