"""Pictures of figures: each is drawn once, and kept for who looks at the same figures again.

They need matplotlib, which the extra `report` installs. Without it, pages have their tables alone.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from threading import Lock

MAX_KEPT = 256


class Pictures:
    """The pictures of one process that were looked at last, at most `MAX_KEPT`."""

    def __init__(self) -> None:
        self._lock = Lock()  # matplotlib draws in one thread at a time
        self._kept: OrderedDict[Hashable, str] = OrderedDict()

    def get(self, key: Hashable, draw: Callable[[], str]) -> str:
        """Return the picture of the figures in `key`, empty where there is nothing to draw with."""
        if not can_draw():
            return ""
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
            drawn = self._kept[key] = draw()
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return drawn


@cache
def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    # It tells at length where it keeps its cache, if not in a home that can be written.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    return find_spec("matplotlib") is not None


PICTURES = Pictures()
