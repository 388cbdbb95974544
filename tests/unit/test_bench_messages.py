"""Messages of trials are read whatever a library has taught `pickle` in the process that sends."""

import copyreg
from multiprocessing import Pipe

import pytest

from gemm_tuner.bench.messages import receive, send
from gemm_tuner.errors import TrialFailed


def _made_elsewhere(text: str) -> TrialFailed:
    return TrialFailed(text)


def test_an_error_is_read_that_a_library_would_write_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        copyreg.dispatch_table, TrialFailed, lambda error: (_made_elsewhere, error.args)
    )
    reader, writer = Pipe(duplex=False)

    with reader, writer:
        send(writer, TrialFailed("had enough"))
        found = receive(reader)

    assert isinstance(found, TrialFailed)
    assert str(found) == "had enough"
