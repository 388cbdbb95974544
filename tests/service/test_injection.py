"""What is sent in any field is a value: no SQL, template, path, command or escape of a terminal."""

import json
from pathlib import Path

import httpx
import pytest
from samples import CPU, PROBLEM
from sqlalchemy import Engine, func, inspect, select, table

from gemm_tuner.store.wire.record import WireCpu

PAYLOADS = {
    "sql": "'; DROP TABLE trials; --",
    "sql of a number": "1 OR 1=1",
    "template": "{{ 79193*88667 }}",
    "path": "../../../../etc/passwd",
    "command": "$(touch {marker})",
    "terminal": "\x1b]0;title\x07\x1b[31m",
    "line": "x\r\nX-Injected: yes",
    "markup": "<script>alert(1)</script>",
}
QUERY = (
    "m",
    "n",
    "k",
    "dtype",
    "epilogue",
    "w_layout",
    "groups",
    "threads",
    "regime",
    "cpu",
    "isa",
)
BODY = ("problem", "threads", "regime", "isa", "compiler", "cursor")


@pytest.fixture(params=PAYLOADS)
def payload(request: pytest.FixtureRequest, marker: Path) -> str:
    """Return each of the payloads."""
    return PAYLOADS[request.param].replace("{marker}", str(marker))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return a file that a command would make."""
    return tmp_path / "injected"


def rows_of(engine: Engine) -> dict[str, int]:
    """Return how many rows each table has that questions do not write to."""
    names = set(inspect(engine).get_table_names()) - {"misses", "jobs", "audit"}
    with engine.connect() as connection:
        return {
            name: connection.scalar(select(func.count()).select_from(table(name))) or 0
            for name in names
        }


def check(answer: httpx.Response, payload: str) -> None:
    """Check that an answer has taken the payload for a value."""
    assert answer.status_code < 500, answer.text
    assert "x-injected" not in answer.headers
    assert "7021805731" not in answer.text  # the product that a template would have made
    assert "root:" not in answer.text
    assert not any(ord(one) < 32 and one not in "\r\n\t" for one in answer.text)
    if "html" in answer.headers.get("Content-Type", "") and "<" in payload:
        assert payload not in answer.text


def test_no_field_is_more_than_a_value(
    own_client: httpx.Client, engine: Engine, payload: str, marker: Path
) -> None:
    before = rows_of(engine)
    plain = {"m": "128", "n": "3072", "k": "768"}
    cpu = WireCpu.of(CPU).model_dump(mode="json")
    question = {"problem": PROBLEM.text, "cpu": cpu}

    answers = [own_client.get("/v1/kernels", params=plain | {name: payload}) for name in QUERY]
    for path in ("/v1/resolve", "/v1/jobs"):
        answers += [own_client.post(path, json=question | {name: payload}) for name in BODY]
        answers += [
            own_client.post(path, json=question | {"cpu": cpu | {name: payload}}) for name in cpu
        ]
    line = json.dumps({"problem": {"text": payload}, "cpu": {"brand": payload}})
    answers += [
        own_client.post("/v1/records", content=line),
        own_client.get("/v1/records", params={"cursor": payload, "cpu": payload}),
        own_client.get("/problems", params={"text": payload}),
    ]
    answers += [
        own_client.get(f"{place}/{httpx.QueryParams({'': payload})}".replace("/=", "/"))
        for place in ("/v1/artifacts/sha256", "/v1/jobs", "/kernels", "/cpus", "/problems", "/jobs")
    ]

    for answer in answers:
        check(answer, payload)
    assert rows_of(engine) == before
    assert not marker.exists()
    assert own_client.get("/v1/kernels", params=plain).status_code == 200
