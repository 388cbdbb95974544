"""A process that draws pictures, and both ends of the way to it.

matplotlib holds Python's lock while it draws: in the process of the service, each picture would
hold up every answer. This one starts with the first picture, lets the service go first, and ends
when nothing was drawn for a while, or when the service has ended.

    python -P -m gemm_tuner_service.dashboard.artist FILE_DESCRIPTOR
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from traceback import format_exc
from typing import Any

from gemm_tuner.machine.urgency import lower_urgency

NICENESS = 10  # the service gets nine tenths of a core that both share
IDLE_S = 300.0
LONGEST_S = 60.0  # to load matplotlib and draw one picture, on a busy machine

_COMMAND = (sys.executable, "-P", "-m", "gemm_tuner_service.dashboard.artist")


class DrawingFailed(Exception):
    """Figures have no picture; the text is that of the error in the process that draws."""


class Artist:
    """Draws in a process of its own, one picture after the other, for one thread.

    Any thread may `stop` it.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # of the process
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def draw(self, drawing: Callable[..., str], figures: tuple[Any, ...]) -> str:
        """Return the picture that a function of a module makes of some figures.

        Raises:
            DrawingFailed: the function failed.
            OSError: no process can be started, or it does not answer.
        """
        try:
            answer = self._ask(drawing, figures)
        except (EOFError, BrokenPipeError, ConnectionResetError):  # it had nothing to do, or died
            self.end()
            try:
                answer = self._ask(drawing, figures)
            except EOFError as error:
                self.end()
                raise OSError("the process that draws died") from error
        is_drawn, text = answer
        if not is_drawn:
            raise DrawingFailed(text)
        return text

    def end(self) -> None:
        """End the process; the next picture starts another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def stop(self) -> None:
        """Draw nothing more: what is being drawn fails at once, and so does what is asked for."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, drawing: Callable[..., str], figures: tuple[Any, ...]) -> tuple[bool, str]:
        connection = self._connection or self._start()
        connection.send((drawing, figures))
        if not connection.poll(LONGEST_S):
            self.end()
            raise TimeoutError(f"nothing was drawn within {LONGEST_S:g} s")
        answer: tuple[bool, str] = connection.recv()
        return answer

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs, self._lock:
            number = theirs.fileno()
            try:
                self._process = self._begun(number)
            except OSError:
                ours.close()
                raise
        self._connection = ours
        return ours

    def _begun(self, number: int) -> "subprocess.Popen[bytes]":
        if self._is_stopped:
            raise OSError("the service ends")
        return subprocess.Popen(
            [*_COMMAND, str(number)], pass_fds=(number,), stdin=subprocess.DEVNULL
        )


def serve(connection: Connection) -> None:
    """Draw what is asked for, until nothing was for `IDLE_S` or nobody is there any more."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while connection.poll(IDLE_S):
            drawing, figures = connection.recv()
            try:
                answer = True, drawing(*figures)
            except Exception:  # noqa: BLE001 - it is the answer
                answer = False, format_exc()
            connection.send(answer)


def main() -> None:
    """Serve on the file descriptor that is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the service, and that ends this
    lower_urgency(NICENESS)
    # It tells at length where it keeps its cache, if not in a home that can be written.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
