"""Pictures of figures: each is drawn once, and kept for who looks at the same figures again.

They need matplotlib, which the extra `report` installs. Without it, pages have their tables alone.
It draws in one thread, beside the pages: a page waits for a picture only shortly, and else has the
last of its kind, or says that it is being drawn.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from threading import Lock

MAX_KEPT = 256
MAX_WAITING = 16  # to be drawn; a page asks again
WAIT_S = 0.05  # of a page, for each picture
COLD_WAIT_S = 0.0  # the same before the first was drawn: to load matplotlib takes longer
BEING_DRAWN = "being drawn"

_LOGGER = logging.getLogger(__name__)


class Pictures:
    """The pictures of one process that were looked at last, at most `MAX_KEPT`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, str] = OrderedDict()
        self._last: OrderedDict[str, str] = OrderedDict()
        self._drawing: dict[Hashable, Future[str]] = {}
        self._artist = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pictures")

    def get(self, kind: str, figures: Hashable, draw: Callable[[], str]) -> str:
        """Return the picture of some figures, as SVG, or `BEING_DRAWN`.

        It is empty where it cannot be drawn. `kind` says which other figures had the same place.
        """
        if not can_draw():
            return ""
        key = (kind, figures)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
            drawing = self._drawing.get(key)
            if drawing is None and len(self._drawing) < MAX_WAITING:
                drawing = self._artist.submit(self._draw, kind, key, draw)
                self._drawing[key] = drawing
            last = self._last.get(kind, BEING_DRAWN)
        if drawing is None:
            return last
        try:
            return drawing.result(WAIT_S if self._last else COLD_WAIT_S)
        except TimeoutError:
            return last

    def _draw(self, kind: str, key: Hashable, draw: Callable[[], str]) -> str:
        drawn = ""
        try:
            drawn = draw()
        except Exception:  # figures of a damaged row: the page has them in its table
            _LOGGER.exception("a picture, %s, could not be drawn", kind)
        with self._lock:
            self._kept[key] = self._last[kind] = drawn
            self._last.move_to_end(kind)
            for pictures in (self._kept, self._last):
                if len(pictures) > MAX_KEPT:
                    pictures.popitem(last=False)
            del self._drawing[key]
        return drawn


@cache
def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    # It tells at length where it keeps its cache, if not in a home that can be written.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    return find_spec("matplotlib") is not None


PICTURES = Pictures()
