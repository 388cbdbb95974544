"""The process that draws: what it says, how it dies, and that it ends with the service."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from gemm_tuner_service.dashboard import artist as module
from gemm_tuner_service.dashboard.artist import Artist, DrawingFailed, serve
from gemm_tuner_service.dashboard.pictures import BEING_DRAWN, Pictures

# Functions of modules, as drawings are, which need no matplotlib.
SHOUT = str.upper
FAIL = json.loads
SLEEP: Callable[..., Any] = time.sleep


@pytest.fixture
def artist() -> Iterator[Artist]:
    one = Artist()
    yield one
    one.end()


def test_what_fails_is_told_and_the_next_is_drawn_by_the_same_process(artist: Artist) -> None:
    assert artist.draw(SHOUT, ("a",)) == "A"
    first = artist._process

    with pytest.raises(DrawingFailed, match="JSONDecodeError"):
        artist.draw(FAIL, ("{",))

    assert artist.draw(SHOUT, ("b",)) == "B"
    assert artist._process is first


def test_one_that_died_is_replaced(artist: Artist) -> None:
    artist.draw(SHOUT, ("a",))
    first = artist._process
    assert first is not None
    first.kill()
    first.wait()

    assert artist.draw(SHOUT, ("b",)) == "B"
    assert artist._process is not first


def test_one_that_dies_at_each_picture_is_no_picture(artist: Artist) -> None:
    with pytest.raises(OSError, match="died"):
        artist.draw(os._exit, (1,))  # it never returns

    assert artist.draw(SHOUT, ("a",)) == "A"


def test_one_that_does_not_answer_is_replaced(
    artist: Artist, monkeypatch: pytest.MonkeyPatch
) -> None:
    artist.draw(SHOUT, ("a",))
    first = artist._process
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(module, "LONGEST_S", 0.1)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            artist.draw(SHOUT, ("b",))

    assert first.returncode == -signal.SIGKILL
    assert artist.draw(SHOUT, ("c",)) == "C"


def test_it_ends_when_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    ours, theirs = Pipe()
    with ours, theirs:
        serve(theirs)


def test_it_ends_with_the_service() -> None:
    program = (
        "import time; from gemm_tuner_service.dashboard.artist import Artist; one = Artist(); "
        "one.draw(str.upper, ('a',)); print(one._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        drawing = int(service.stdout.readline())
        service.kill()
    end_s = time.monotonic() + 60
    while _runs(drawing) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not _runs(drawing)


def test_where_no_process_starts_pictures_are_left_out_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = Pictures()
    for name in ("WAIT_S", "COLD_WAIT_S"):
        monkeypatch.setattr(f"gemm_tuner_service.dashboard.pictures.{name}", 60.0)
    with monkeypatch.context() as full:
        full.setattr(module, "_COMMAND", ("/nowhere/python",))
        assert not pictures.ask("a letter", SHOUT, "a").svg

    assert pictures.ask("a letter", SHOUT, "a").svg == "A"
    pictures._artist.end()


def test_who_ends_waits_for_no_picture() -> None:
    """Sixteen may be asked for, and one that does not answer is waited for a minute."""
    pictures = Pictures()
    began, drawing = pictures.ask("a letter", SLEEP, 600), pictures._artist
    waiting = pictures.ask("another", SHOUT, "b")
    while not _has_process(drawing):
        time.sleep(0.001)

    pictures.stop()
    pictures._in_turn.shutdown()

    assert began.drawn is not None
    assert began.drawn.result() == ""
    assert (waiting.svg, waiting.drawn and waiting.drawn.cancelled()) == (BEING_DRAWN, True)
    assert not _has_process(drawing)
    with pytest.raises(OSError, match="ends"):
        drawing.draw(SHOUT, ("c",))


def test_pictures_are_drawn_again_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several services may run in one process, one after the other."""
    monkeypatch.setattr("gemm_tuner_service.dashboard.pictures.COLD_WAIT_S", 60.0)
    pictures = Pictures()
    pictures.stop()

    assert pictures.ask("a letter", SHOUT, "a").svg == "A"
    pictures.stop()


def test_no_traceback_tells_of_a_process_that_died(caplog: pytest.LogCaptureFixture) -> None:
    pictures = Pictures()
    drawn = pictures.ask("a letter", os._exit, 1).drawn
    assert drawn is not None
    assert drawn.result() == ""
    pictures.stop()

    (line,) = caplog.records
    assert line.getMessage() == "no picture is drawn now: the process that draws died"
    assert line.exc_info is None


def _has_process(artist: Artist) -> bool:
    return artist._process is not None


def _runs(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
