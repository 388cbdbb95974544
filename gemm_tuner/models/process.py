"""The process of one way, seen from the one that measures: questions, answers, deadlines."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from time import monotonic
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from gemm_tuner.domain.units import duration_text
from gemm_tuner.errors import TrialFailed
from gemm_tuner.models.messages import (
    ANSWER,
    ORDER,
    QUESTION,
    Looked,
    Order,
    Question,
    Ready,
    Sampled,
)

CHILD = (sys.executable, "-P", "-m", "gemm_tuner.models.child")
# Nothing is told to the makers of packages, and tokenizers write less of what they find.
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
_LAST_BYTES = 4096
_READ_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of an answer
_Kind = TypeVar("_Kind", Ready, Sampled, Looked)


class WayInterrupted(TrialFailed):
    """A way failed, and its cause may pass: its deadline, or that it was killed."""


class WayProcess:
    """A process that prepares a model in one way. It is killed, with all it started, at the end."""

    def __init__(self, order: Order, *, deadline_s: float, command: Sequence[str] = CHILD) -> None:
        """Start it; each answer may take `deadline_s` seconds."""
        self._deadline_s = deadline_s
        self._said = TemporaryFile()  # noqa: SIM115 - closed with this
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            # Ctrl-C is for the process that measures.
            start_new_session=True,
            env=os.environ | _ENVIRONMENT,
        )
        self._write(ORDER, order)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End the process, whatever it does."""
        self.end()

    def ask(self, question: Question, kind: type[_Kind]) -> _Kind:
        """Return the answer to a question, which is of this kind.

        Raises:
            TrialFailed: as for `answer`.
        """
        self._write(QUESTION, question)
        return self.answer(kind)

    def answer(self, kind: type[_Kind]) -> _Kind:
        """Return the next answer, which is of this kind.

        Raises:
            TrialFailed: the way failed, ended or answered something else.
            WayInterrupted: it took longer than its deadline, or was killed.
        """
        until_s = monotonic() + self._deadline_s
        line = self._line(until_s)
        try:
            answer = ANSWER.validate_json(line)
        except ValidationError as error:
            raise TrialFailed(_not_understood(line)) from error
        if answer.failed:
            raise TrialFailed(answer.failed)
        for part in (answer.ready, answer.sampled, answer.looked):
            if isinstance(part, kind):
                return part
        raise TrialFailed(_not_understood(line))

    def end(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def _write(self, of: TypeAdapter[Any], message: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and the answer says how
            self._process.stdin.write(of.dump_json(message) + b"\n")

    def _line(self, until_s: float) -> bytes:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([output], [], [], max(0.0, until_s - monotonic()))
            if not ready:
                raise WayInterrupted(f"it took longer than {duration_text(self._deadline_s)}")
            read = os.read(output, _READ_BYTES)
            if not read:
                raise self._end_of_process()
            self._unread += read
            if len(self._unread) > _MOST_BYTES:
                raise TrialFailed(f"its answer is longer than {_MOST_BYTES} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end_of_process(self) -> TrialFailed:
        code = self._process.wait()
        kind = WayInterrupted if code == -signal.SIGKILL else TrialFailed  # memory was short
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _LAST_BYTES))
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return kind(f"its process ended with {how}{f': {last[:400]}' if last else ''}")


def _not_understood(line: bytes) -> str:
    return f"its answer is not understood: {line[:200]!r}"
