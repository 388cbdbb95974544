"""Messages of trials are read whatever a library has taught `pickle` in the process that sends."""

import copyreg
import pickle
from multiprocessing import Pipe

import pytest

from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.messages import receive, send
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import StoreFailed, TrialFailed
from gemm_tuner.tuning.budget import Budget


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


@pytest.mark.parametrize("owner", [Outcome, StoreFailed, Budget, Finding])
def test_a_message_changes_no_class(owner: type) -> None:
    """A pickle may end with "set these attributes of what I named"."""
    setting = pickle.dumps((None, {"value": "correct"}), protocol=2)[2:-1]
    message = f"c{owner.__module__}\n{owner.__qualname__}\n".encode() + setting + b"b."
    reader, writer = Pipe(duplex=False)
    before = dict(vars(owner))

    with reader, writer:
        writer.send_bytes(message)
        with pytest.raises(TrialFailed):
            receive(reader)

    assert dict(vars(owner)) == before


@pytest.mark.parametrize("sent", [Finding(outcome=Outcome.WRONG, detail="no"), *Outcome])
def test_what_an_answer_is_made_of_comes_through(sent: object) -> None:
    reader, writer = Pipe(duplex=False)

    with reader, writer:
        send(writer, sent)

        assert receive(reader) == sent


class _Named:
    """Is pickled as an attribute of something, as Python 3.11.0 to 3.11.3 writes enum members."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self._owner, self._name)


def test_members_of_enums_by_their_names_come_through() -> None:
    reader, writer = Pipe(duplex=False)

    with reader, writer:
        send(writer, _Named(Outcome, "WRONG"))

        assert receive(reader) is Outcome.WRONG


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Outcome, "__init__"), (Outcome, "GUESSED"), (TrialFailed, "__init__"), ("text", "format")],
)
def test_no_other_attribute_comes_through(owner: object, name: str) -> None:
    reader, writer = Pipe(duplex=False)

    with reader, writer:
        send(writer, _Named(owner, name))

        with pytest.raises(TrialFailed, match="no answer"):
            receive(reader)
