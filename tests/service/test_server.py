import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.server.connections import server_config
from gemm_tuner_service.settings import Settings
from samples import PROBLEM


def test_many_callers_get_the_same_answer(client: httpx.Client) -> None:
    def ask(_number: int) -> bytes:
        return client.post("/v1/resolve", json={"problem": PROBLEM.text}).content

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(ask, range(24)))

    assert len(answers) == 1


def test_a_huge_body_does_not_stop_the_server(client: httpx.Client) -> None:
    try:
        answer = client.post("/v1/resolve", content=b"x" * 2**24)
    except httpx.TransportError:  # the server hung up while the body was still being sent
        pass
    else:
        assert answer.status_code == 413

    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("cause", ["database", "fault"])
def test_a_start_that_fails_is_one_line_and_a_fault_has_its_traceback(
    cause: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cause == "fault":
        monkeypatch.setattr("gemm_tuner_service.app.RunningService", None)
    (tmp_path / "db.sqlite3").write_bytes(b"no database" * 1000)
    settings = Settings(
        database_url=f"sqlite:///{tmp_path}/db.sqlite3", signing_key_path=tmp_path / "key.pem"
    )
    server = uvicorn.Server(server_config(create_app(settings), log_config=None))
    with socket.socket() as listener, caplog.at_level(logging.ERROR, logger="uvicorn.error"):
        listener.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit) as ended:
            server.run([listener])

    assert ended.value.code == 3
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 2
    assert ("Traceback" in told[0]) is (cause == "fault")
    assert ("db.sqlite3" in told[0]) is (cause == "database")
    assert told[1] == "Application startup failed. Exiting."
