"""A question that gives a name twice is refused: nobody knows which value is meant."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError

_LONGEST_SHOWN = 64


class NamedTwice(ValueError):
    """A name is given more than once."""


def members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what is named, for `json.loads`.

    Raises:
        NamedTwice: a name is there more than once.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _count)] = Counter(name for name, _value in pairs).most_common(1)
        raise NamedTwice(f"{name[:_LONGEST_SHOWN]!r} is given more than once; give it once")
    return found


async def _check_names(request: Request) -> None:
    try:
        members(request.query_params.multi_items())
        # What is no JSON is refused elsewhere, in other words.
        with suppress(UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            json.loads(await request.body(), object_pairs_hook=members)
    except NamedTwice as error:
        fault = {"type": "value_error", "loc": ("body",), "msg": str(error)}
        raise RequestValidationError([fault]) from None


# The dependency of routes with such questions.
NAMES_ONCE = Depends(_check_names)
