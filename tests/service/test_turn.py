"""A look-up that is shared in one turn of the event loop, and made anew in the next."""

import asyncio
from itertools import count

from gemm_tuner_service.answering.turn import OncePerTurn


async def _values_of_turns() -> list[tuple[int, int]]:
    look_up = OncePerTurn(count().__next__)
    found = []
    for _turn in range(3):
        found.append((look_up(), look_up()))
        await asyncio.sleep(0)
    return found


def test_a_value_is_looked_up_once_in_a_turn() -> None:
    assert asyncio.run(_values_of_turns()) == [(0, 0), (1, 1), (2, 2)]


async def _seen_by_a_later_request() -> tuple[int, int]:
    state = 0
    look_up = OncePerTurn(lambda: state)

    async def ask() -> int:
        return look_up()

    before = look_up()
    state = 1
    request = asyncio.create_task(ask())  # as of a request that is read in this turn
    return before, await request


def test_who_asks_after_a_change_sees_it() -> None:
    assert asyncio.run(_seen_by_a_later_request()) == (0, 1)
