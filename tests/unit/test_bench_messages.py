"""Messages of trials are data of the type that was asked for, or they are refused."""

import json
import math
from collections.abc import Callable
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import pytest

from gemm_tuner.bench.baselines.learn import Checked
from gemm_tuner.bench.finding import TIMED_FINDINGS, Finding, TimedFinding
from gemm_tuner.bench.messages import receive, send
from gemm_tuner.bench.sample import Sample
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import KernelRejected, StoreFailed, TrialFailed

WRONG = Finding(outcome=Outcome.WRONG, detail="no", emulated=frozenset({IsaFeature.AMX_TILE}))
SAMPLES = (Sample(elapsed_ns=5, involuntary_switches=0, waited_ns=0),)
CHECKED = Checked(
    text="a library",
    implementation="its kernel",
    call_s=math.inf,
    choice={"f32 1x2x3 nk none on 1": "as it is"},
    is_quiet=True,
)


def _received(put: Callable[[Any], None], wanted: Any) -> Any:  # noqa: ANN401 - a type, and one of it
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        sending = Thread(target=put, args=(writer,))  # a pipe keeps 64 KB
        sending.start()
        try:
            return receive(reader, wanted)
        finally:
            sending.join()


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (WRONG, Finding),
        ((TimedFinding(finding=WRONG, samples=(SAMPLES, ())),), TIMED_FINDINGS),
        ((), TIMED_FINDINGS),
        (CHECKED, Checked | str),
        ("y is wrong", Checked | str),
    ],
)
def test_an_answer_comes_through(sent: object, wanted: object) -> None:
    assert _received(lambda writer: send(writer, sent, wanted), wanted) == sent


@pytest.mark.parametrize("error", [TrialFailed("had enough"), KernelRejected("")])
def test_an_error_comes_through(error: Exception) -> None:
    found = _received(lambda writer: send(writer, error, Finding), Finding)

    assert (type(found), str(found)) == (type(error), str(error))


def test_what_utf_8_lacks_is_told() -> None:
    file = "no file \udcff"

    error = _received(lambda writer: send(writer, StoreFailed(file), Finding), Finding)
    finding = Finding(outcome=Outcome.WRONG, detail=file)
    failure = _received(lambda writer: send(writer, finding, Finding), Finding)

    assert (type(error), str(error)) == (StoreFailed, "no file \\udcff")
    assert isinstance(failure, TrialFailed)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        b"\x80\x04.",
        b"null",
        b"[null]",
        b"[null, null, null]",
        b'[{"outcome": "right"}, null]',
        b'[{"outcome": "correct", "detail": 5}, null]',
        b'[{"outcome": "correct", "emulated": ["none"]}, null]',
        b'[{"outcome": "correct", "emulated": "avx2"}, null]',
        b'[{"outcome": "correct", "more": 1}, null]',
        b'["correct", null]',
        b'[null, {"name": "SystemExit", "text": ""}]',
        b'[null, {"name": "__doc__", "text": ""}]',
        b'[null, {"name": "GemmTunerError", "text": 5}]',
        b'[null, {"name": "TrialFailed"}]',
        b'[null, ["TrialFailed", ""]]',
        b"[" * 1_000_000,
        b'[{"outcome": ' * 50_000,
        b'[{"outcome": "correct", "emulated": [' + b"1," * 100_000 + b"1]}, null]",
        b'[{"outcome": "correct", "detail": "' + b"x" * 1000,
        b'[{"outcome": "correct", "detail": "\xff"}, null]',
    ],
)
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(TrialFailed, match="no answer") as refusal:
        _received(lambda writer: writer.send_bytes(content), Finding)

    assert len(str(refusal.value)) < 300


def test_an_answer_that_is_too_long_is_told_by_its_length() -> None:
    finding = Finding(outcome=Outcome.WRONG, detail="x" * (1 << 20))

    failure = _received(lambda writer: send(writer, finding, Finding), Finding)

    assert isinstance(failure, TrialFailed)
    assert "too long: 10486" in str(failure)


def test_a_number_that_is_none_is_refused() -> None:
    checked = {"text": "", "implementation": "", "choice": {}, "is_quiet": True, "call_s": "1"}
    message = json.dumps([checked, None]).encode()

    with pytest.raises(TrialFailed, match="no answer"):
        _received(lambda writer: writer.send_bytes(message), Checked | str)


def test_neither_an_answer_nor_an_error_is_refused() -> None:
    with pytest.raises(TrialFailed, match="no answer"):
        _received(lambda writer: writer.send_bytes(b"[null, null]"), Finding)


def test_an_error_with_an_answer_is_an_error() -> None:
    message = b'[{"outcome": "correct"}, {"name": "StoreFailed", "text": "full"}]'

    assert isinstance(_received(lambda writer: writer.send_bytes(message), Finding), StoreFailed)
