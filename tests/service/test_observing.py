"""What is noted of requests: ids, the access log, numbers for Prometheus, readiness."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import pytest
from gemm_tuner_service.logs import (
    ACCESS_BURST,
    ACCESS_LOGGER,
    AccessLogHandler,
    BoundedHandler,
    bound_logs,
    log_access,
)
from gemm_tuner_service.readiness import KNOWN_S, Readiness
from prometheus_client.parser import text_string_to_metric_families
from samples import PROBLEM, add_build, make_artifact
from sqlalchemy import Engine

from gemm_tuner.domain.access import TokenSecret
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import artifacts

LOGGED_WITHIN_S = 60.0


@pytest.fixture
def access_log() -> Iterator[StringIO]:
    logger = logging.getLogger(ACCESS_LOGGER)
    before = (logger.handlers[:], logger.level, logger.propagate)
    stream = StringIO()
    log_access(AccessLogHandler(stream))
    yield stream
    logger.handlers[:], logger.level, logger.propagate = before


def lines(stream: StringIO, count: int = 1) -> list[dict[str, object]]:
    """Return the lines, `count` of them at least: a request is logged after it is answered.

    Those of the tests before, whose id is "mine", may come late, and are left out.
    """
    deadline_s = time.monotonic() + LOGGED_WITHIN_S
    while True:
        logged = [json.loads(line) for line in stream.getvalue().splitlines()]
        own = [line for line in logged if line.get("request_id") != "mine"]
        if len(own) >= count or time.monotonic() > deadline_s:
            return own
        time.sleep(0.001)


@pytest.mark.parametrize("sent", ["a", "0f-1.b_C", "x" * 64])
def test_a_valid_request_id_is_kept(client: httpx.Client, sent: str) -> None:
    assert client.get("/healthz", headers={"X-Request-ID": sent}).headers["X-Request-ID"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 65, "a b", 'a"', "ä"])
def test_another_request_id_is_replaced(client: httpx.Client, sent: str) -> None:
    header = (b"X-Request-ID", sent.encode())
    answers = [client.get("/healthz", headers=[header]) for _ask in range(2)]

    ids = [answer.headers["X-Request-ID"] for answer in answers]
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/kernels", "/v1/kernels?m=x"])
def test_an_error_has_a_request_id_too(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"X-Request-ID": "mine"}).headers["X-Request-ID"] == "mine"


def test_a_line_of_the_access_log_is_json(client: httpx.Client, access_log: StringIO) -> None:
    answer = client.post(
        "/v1/resolve", json={"problem": PROBLEM.text}, headers={"X-Request-ID": "json"}
    )
    client.get("/v1/%1b[2J%0a")

    first, second = lines(access_log, 2)
    assert {name: first[name] for name in ("request_id", "method", "path", "status", "bytes")} == {
        "request_id": "json",
        "method": "POST",
        "path": "/v1/resolve",
        "status": 200,
        "bytes": len(answer.content),
    }
    assert (first["caller"], first["route"]) == ("127.0.0.1", "/v1/resolve")
    assert (second["route"], second["status"]) == ("other", 404)
    assert "\x1b" not in access_log.getvalue()


def test_the_access_log_shows_no_token(client: httpx.Client, access_log: StringIO) -> None:
    token = TokenSecret.generate().text

    client.get(
        f"/v1/{token}?token={token}",
        headers={"Authorization": f"Bearer {token}", "X-Request-ID": token},
    )

    assert len(lines(access_log)) == 1
    assert token[3:] not in access_log.getvalue()


def test_the_access_log_is_bounded_and_says_what_was_left_out() -> None:
    now_s = 0.0
    stream = StringIO()
    handler = AccessLogHandler(stream, now_s=lambda: now_s)
    handler.setFormatter(logging.Formatter("%(message)s"))
    record = logging.makeLogRecord({"msg": '{"status": 200}'})

    for _number in range(3 * ACCESS_BURST):
        handler.handle(record)
    assert len(lines(stream)) == ACCESS_BURST

    now_s = 60.0
    handler.handle(record)
    assert lines(stream)[-2] == {"left_out": 2 * ACCESS_BURST}


def test_a_message_names_the_request_it_is_about(own_client: httpx.Client, engine: Engine) -> None:
    names = ("uvicorn", "asyncio", "gemm_tuner_service")
    before = [(logging.getLogger(each).handlers[:], each) for each in names]
    stream = StringIO()
    bound_logs(BoundedHandler(stream))
    with engine.begin() as connection:
        connection.execute(artifacts.update().values(compressed_binary=b"\0"))

    url = f"/v1/artifacts/sha256/{make_artifact().sha256}"
    answer = own_client.get(url, headers={"X-Request-ID": "mine"})

    for handlers, name in before:
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).propagate = True
    assert answer.status_code == 503
    assert "[mine]: answered 503" in stream.getvalue()


def _value(client: httpx.Client, name: str, **labels: str) -> float:
    text = client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def test_requests_are_counted_by_route_and_status(client: httpx.Client) -> None:
    labels = {"route": "/v1/artifacts/sha256/{sha256}", "method": "GET", "status": "404"}
    before = _value(client, "gemm_tuner_requests_total", **labels)

    for number in range(3):
        client.get(f"/v1/artifacts/sha256/{number:064d}")

    assert _value(client, "gemm_tuner_requests_total", **labels) == before + 3
    assert _value(client, "process_open_fds") > 0


def test_what_callers_invent_makes_no_new_series(client: httpx.Client) -> None:
    def invent(number: int) -> int:
        client.get(f"/v1/nothing/{number}")
        client.request(f"BREW{number}", "/healthz")
        return client.get("/metrics").text.count("gemm_tuner_")

    invent(0)
    count = invent(1)

    assert [invent(number) for number in range(2, 10)] == [count] * 8


def test_the_numbers_of_several_processes_are_added_up(tmp_path: Path) -> None:
    count = (
        "from gemm_tuner_service.metrics import REQUESTS, render; "
        "REQUESTS.labels('GET', '/healthz', '200').inc(2); print(render().decode())"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    for expected in ("2.0", "4.0"):
        done = subprocess.run(
            [sys.executable, "-c", count],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert f'route="/healthz",status="200"}} {expected}' in done.stdout


def test_a_damaged_artifact_makes_the_service_unready_until_it_is_replaced(
    engine: Engine, repository: Repository
) -> None:
    clock = [0.0]
    readiness = Readiness(engine, repository, now_s=lambda: clock[0])
    assert readiness.fault() is None
    with engine.begin() as connection:
        connection.execute(artifacts.update().values(compressed_binary=b"\0"))

    assert readiness.fault() is None  # it looked a moment ago
    clock[0] += KNOWN_S
    fault = readiness.fault()
    assert fault is not None
    assert "damaged" in fault

    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM artifacts")
    add_build(repository)
    clock[0] += KNOWN_S
    assert readiness.fault() is None


def test_an_empty_store_is_ready(engine: Engine, repository: Repository) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM artifacts")

    assert Readiness(engine, repository).fault() is None


def test_every_artifact_can_be_drawn(repository: Repository) -> None:
    digest = make_artifact().sha256

    for start in ("0" * 64, digest, "f" * 64):
        assert repository.artifact_from(start) == digest
