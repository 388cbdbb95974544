"""Pictures of figures: each is drawn once, and kept for who looks at the same figures again.

They need matplotlib, which the extra `report` installs. Without it, pages have their tables alone.
A process draws them beside the pages: a page that is written waits for its pictures only shortly,
and else has the last of their kinds, or says that they are being drawn.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

from gemm_tuner_service.dashboard.artist import Artist, DrawingFailed

MAX_KEPT = 256
MAX_WAITING = 16  # to be drawn; a page asks again
WAIT_S = 0.1  # of a page, from when it asks for a picture
COLD_WAIT_S = 0.0  # the same before the first was drawn: to load matplotlib takes longer
BEING_DRAWN = "being drawn"

_LOGGER = logging.getLogger(__name__)
_Key = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a page has asked for: it may be drawn while the page looks up the rest."""

    drawn: "Future[str] | None"
    else_shown: str
    until_s: float

    @property
    def svg(self) -> str:
        """The picture, once it was waited for, or what is shown else; nothing if it has none."""
        if self.drawn is None:
            return self.else_shown
        try:
            return self.drawn.result(max(0.0, self.until_s - time.monotonic()))
        except (TimeoutError, CancelledError):
            return self.else_shown


class Pictures:
    """The pictures of one process that were looked at last, at most `MAX_KEPT`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[_Key, str] = OrderedDict()
        self._last: OrderedDict[str, str] = OrderedDict()
        self._drawing: dict[_Key, Future[str]] = {}
        self._artist = Artist()
        self._in_turn = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pictures")

    def ask(self, kind: str, drawing: Callable[..., str], *figures: Any) -> Picture:  # noqa: ANN401
        """Return the picture that `drawing`, a function of a module, makes of some figures.

        Figures can be hashed and pickled. `kind` says which other figures had the same place:
        their picture is shown while this one is not ready.
        """
        if not can_draw():
            return Picture(None, "", 0)
        key = (kind, figures)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return Picture(None, known, 0)
            drawn = self._drawing.get(key)
            if drawn is None and len(self._drawing) < MAX_WAITING:
                drawn = self._in_turn.submit(self._draw, key, drawing)
                self._drawing[key] = drawn
            wait_s = WAIT_S if self._last else COLD_WAIT_S
            return Picture(drawn, self._last.get(kind, BEING_DRAWN), time.monotonic() + wait_s)

    def stop(self) -> None:
        """Draw nothing of what was asked for: who ends waits for no picture."""
        with self._lock:
            for key in [key for key, drawn in self._drawing.items() if drawn.cancel()]:
                del self._drawing[key]
            stopped, self._artist = self._artist, Artist()
        stopped.stop()
        self._in_turn.submit(stopped.end)

    def _draw(self, key: _Key, drawing: Callable[..., str]) -> str:
        kind, figures = key
        svg, is_kept = "", True
        artist = self._artist
        try:
            svg = artist.draw(drawing, figures)
        except DrawingFailed as error:  # figures of a damaged row: the page has them in its table
            _LOGGER.error("a picture, %s, could not be drawn: %s", kind, error)  # noqa: TRY400
        except OSError as error:
            is_kept = False
            if artist is self._artist:  # and was not stopped
                _LOGGER.warning("no picture is drawn now: %s", error)
        except Exception:
            is_kept = False
            _LOGGER.exception("no picture is drawn now")
        with self._lock:
            if is_kept:
                self._kept[key] = self._last[kind] = svg
                self._last.move_to_end(kind)
            for pictures in (self._kept, self._last):
                if len(pictures) > MAX_KEPT:
                    pictures.popitem(last=False)
            del self._drawing[key]
        return svg


@cache
def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


PICTURES = Pictures()
