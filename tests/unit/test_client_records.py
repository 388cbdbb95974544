"""Reading the records of a service, which may send anything."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from samples import CPU, PROBLEM, make_trial

from gemm_tuner.client import records
from gemm_tuner.client.records import lines_at
from gemm_tuner.client.transport import Session
from gemm_tuner.errors import InvalidSetting, ServiceFailed
from gemm_tuner.store.wire.record import dump_record, parse_record

URL = "http://127.0.0.1:9"
OURS = json.loads(dump_record(make_trial()))
OF_ANOTHER_MODEL = json.loads(dump_record(make_trial(cpu=replace(CPU, model=77))))
OF_ANOTHER_PROBLEM = {**OURS, "problem": "f32 1x1x1 nk none"}


def page(*found: object, next_cursor: object = None) -> bytes:
    return json.dumps({"records": list(found), "next_cursor": next_cursor}).encode()


def answer(monkeypatch: pytest.MonkeyPatch, *pages: bytes) -> list[int]:
    """Let the service answer with these pages in turn; return the cursors that it was asked."""
    asked: list[int] = []
    waiting: Iterator[bytes] = iter(pages)

    def send(_session: Session, cursor: int, _limit: int, **_settings: Any) -> bytes:  # noqa: ANN401 - whatever it is told
        asked.append(cursor)
        return next(waiting)

    monkeypatch.setattr(Session, "records", send)
    return asked


def test_every_page_is_read_and_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = page(OF_ANOTHER_MODEL, OURS, next_cursor=7)
    asked = answer(monkeypatch, first, page(OF_ANOTHER_PROBLEM, OURS))

    found = list(lines_at(URL, [PROBLEM], CPU))

    assert asked == [0, 7]
    assert [problem for problem, _line in found] == [PROBLEM, PROBLEM]
    assert {parse_record(line) for _problem, line in found} == {make_trial()}


def test_what_is_no_record_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = [{}, {"problem": ["f32"], "cpu": 1}, {**OURS, "cpu": None}, {**OURS, "cpu": {}}]
    answer(monkeypatch, page(*strange))

    assert not list(lines_at(URL, [PROBLEM], CPU))


@pytest.mark.parametrize(
    "content",
    [b"", b"[" * 100_000, b"[]", b"{}", page(1), page(next_cursor="0"), b'{"records": {}}'],
    ids=lambda content: str(content[:20]),
)
def test_an_answer_that_is_no_page_is_refused(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, content)

    with pytest.raises(ServiceFailed, match="not understood; check the address"):
        list(lines_at(URL, [PROBLEM], CPU))


@pytest.mark.parametrize("cursor", [0, -5])
def test_a_service_that_names_the_same_page_again_is_not_asked_for_ever(
    cursor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer(monkeypatch, page(next_cursor=cursor))

    assert not list(lines_at(URL, [PROBLEM], CPU))
    assert asked == [0]


def test_no_more_than_so_many_records_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_RECORDS", 300)
    asked = answer(monkeypatch, *(page(next_cursor=number) for number in range(1, 9)))

    assert not list(lines_at(URL, [PROBLEM], CPU))
    assert asked == [0, 1, 2]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="service address"):
        list(lines_at("nowhere", [PROBLEM], CPU))
