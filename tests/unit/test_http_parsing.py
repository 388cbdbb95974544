"""The patterns that stand in h11's place: they match the same, in a time that is bounded."""

import re
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import product

import h11
import pytest
from h11 import _abnf, _readers

from gemm_tuner import http_parsing

BLANKS = b" " * 60_000
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MAX_S = 0.05


def texts(alphabet: bytes, length: int) -> Iterator[bytes]:
    """Yield each text of up to so many of these bytes."""
    for count in range(length + 1):
        for letters in product(alphabet, repeat=count):
            yield bytes(letters)


def read_all(connection: h11.Connection) -> None:
    while connection.next_event() is not h11.NEED_DATA:
        pass


def found(pattern: re.Pattern[bytes], line: bytes) -> dict[str, bytes | None] | None:
    match = pattern.fullmatch(line)
    return None if match is None else match.groupdict()


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"X:" + BLANKS + b"\0\r\n\r\n",
        HEAD + b"X:" + BLANKS + b"\x0b\r\n\r\n",
        HEAD + b"X: a" + BLANKS + b"\0\r\n\r\n",
        HEAD + b"X:" + b" a" * 10_000 + b"\0\r\n\r\n",
        HEAD + b"X:\r\n" + b" \r\n" * 10_000 + b" \0\r\n\r\n",
        CHUNKED + b"2;" + BLANKS + b"\n\r\n",
        CHUNKED + b"2" + BLANKS + b"\n\r\n",
        CHUNKED + b"0\r\nX:" + BLANKS + b"\0\r\n\r\n",
    ],
)
def test_a_head_of_blanks_is_refused_at_once(sent: bytes) -> None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(sent)

    begin_s = time.thread_time()
    with pytest.raises(h11.RemoteProtocolError):
        read_all(connection)

    assert time.thread_time() - begin_s < MAX_S


def test_headers_are_those_of_h11() -> None:
    theirs = re.compile(_abnf.header_field.encode())

    for value in texts(b"a: \t\0\x0b", 5):
        for line in (b"a:" + value, value):
            assert found(_readers.header_field_re, line) == found(theirs, line), line


def test_heads_of_chunks_are_those_of_h11() -> None:
    theirs = re.compile(_abnf.chunk_header.encode())

    for rest in texts(b"1; \t\r\n", 5):
        for line in (b"1" + rest + b"\r\n", b"1;" + rest):
            assert found(_readers.chunk_header_re, line) == found(theirs, line), line


def test_h11_reads_with_these_patterns() -> None:
    assert "header_field_re" in _readers._decode_header_lines.__code__.co_names
    assert "chunk_header_re" in _readers.ChunkedReader.__call__.__code__.co_names
    for name, _slow, fast in http_parsing._FASTER:
        assert fast in getattr(_readers, name).pattern


@pytest.mark.parametrize(
    "name", ["gemm_tuner.client.transport", "gemm_tuner_service.server.connections"]
)
def test_the_client_and_the_service_read_with_them(name: str) -> None:
    assert vars(import_module(name))["gemm_tuner"].http_parsing is http_parsing
