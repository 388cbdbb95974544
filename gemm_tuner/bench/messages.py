"""Messages from processes that a kernel may have taken over: data, and never code.

A pickle may name any function for its reader to call, and change what it names. So an answer is
JSON of the type that was asked for, and each of its values is checked.
"""

from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

import gemm_tuner.errors
from gemm_tuner.errors import GemmTunerError, TrialFailed

# An answer has some hundred KiB at most. To refuse one takes 300 times its length of memory, and a
# second for each MiB, since pydantic collects all that is wrong with it.
_MOST_BYTES = 1 << 20
_CONFIG = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    """An error: the name of its class, and its text."""

    name: str
    text: str


@cache
def messages_of(wanted: Any) -> "TypeAdapter[tuple[Any, _Raised | None]]":  # noqa: ANN401 - a type
    """Return what writes and reads answers of a type, or the error in the place of one.

    Making it takes some milliseconds, which a process can spend before it is forked.
    """
    return TypeAdapter(tuple[wanted | None, _Raised | None], config=_CONFIG)


def send(connection: Connection, answer: object, wanted: Any) -> None:  # noqa: ANN401 - a type
    """Send an answer of the type that is wanted, or an error."""
    raised = None
    if isinstance(answer, GemmTunerError):
        raised = _Raised(name=type(answer).__name__, text=_written(str(answer)))
        answer = None
    try:
        content = messages_of(wanted).dump_json((answer, raised))
    except PydanticSerializationError as error:
        failure = _Raised(name="TrialFailed", text=_written(f"it cannot be told: {error}"))
        content = messages_of(wanted).dump_json((None, failure))
    if len(content) > _MOST_BYTES:
        failure = _Raised(name="TrialFailed", text=f"the answer is too long: {len(content)} bytes.")
        content = messages_of(wanted).dump_json((None, failure))
    connection.send_bytes(content)


def receive(connection: Connection, wanted: Any) -> Any:  # noqa: ANN401 - a type, and one of it
    """Return the next answer, or the error that came instead.

    Raises:
        EOFError: the other end is closed.
        TrialFailed: the message is no answer of the type that is wanted.
    """
    try:
        content = connection.recv_bytes(_MOST_BYTES)
    except EOFError:
        raise
    except OSError as error:
        raise EOFError(f"the message cannot be read: {error}") from error
    try:
        answer, raised = messages_of(wanted).validate_json(content)
    except ValidationError as error:
        raise _no_answer(f"{error.error_count()} values are wrong") from None
    except GemmTunerError as error:
        raise _no_answer(error) from error
    if raised is None and answer is not None:
        return answer
    if raised is None:
        raise _no_answer("nothing")
    kind = getattr(gemm_tuner.errors, raised.name, None)
    if not (isinstance(kind, type) and issubclass(kind, GemmTunerError)):
        raise _no_answer(raised.name)
    return kind(raised.text)


def _written(text: str) -> str:
    """Return a text without what UTF-8 lacks, such as a byte of a file name."""
    return text.encode(errors="backslashreplace").decode()


def _no_answer(what: object) -> TrialFailed:
    return TrialFailed(f"sent what is no answer: {what!s:.200}")
