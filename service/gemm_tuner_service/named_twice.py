"""A question that gives a name twice is refused: nobody knows which value is meant."""

import json
from collections import Counter
from collections.abc import Sequence
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
        _check_body(await request.body())
    except NamedTwice as error:
        fault = {"type": "value_error", "loc": ("body",), "msg": str(error)}
        raise RequestValidationError([fault]) from None


def _check_body(body: bytes) -> None:
    try:
        # Numbers stay texts: a long one would not become a number.
        json.loads(body, object_pairs_hook=members, parse_int=str, parse_float=str)
    except NamedTwice:
        raise
    except (ValueError, RecursionError):
        return  # what is no JSON is refused elsewhere, in other words


# The dependency of routes with such questions.
NAMES_ONCE = Depends(_check_names)
