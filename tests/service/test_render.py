"""A page is made of what was read once: a caller who asks without end costs no files."""

import sys

from gemm_tuner_service.dashboard.render import NONCE, render, style

_opened: list[object] = []
_watched = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watched and event in {"open", "os.listdir", "os.scandir"}:
        _opened.append(arguments[0])


def _page() -> bytes:
    scope = {"type": "http", "path": "/absent", "state": {NONCE: "n"}}
    return render(scope, "error.html.j2", status=429, title="Busy", detail="Ask again.")


def test_a_second_page_reads_no_file() -> None:
    global _watched  # noqa: PLW0603 - an audit hook cannot be taken away
    first = _page(), style()
    sys.addaudithook(_watch)
    _watched = True
    try:
        again = _page(), style()
    finally:
        _watched = False

    assert again == first
    assert _opened == []
