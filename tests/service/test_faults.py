"""Faults beneath a running service: it answers, or says that it cannot, and goes on by itself."""

import json
import random
import signal
import threading
import time
import zlib
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from queue import Queue

import httpx
import pytest
from databases import Databases
from gemm_tuner_service.answering.answers import Answers, Asked
from gemm_tuner_service.answering.resolver import Resolver
from gemm_tuner_service.settings import Settings
from postgres import PostgresServer
from samples import CONTEXT, CPU, PROBLEM, add_build, make_artifact, make_failed_trial, make_trial
from serving import served, settings_of, tune
from sqlalchemy import Engine, insert, update
from writers import start_writer, written_binary

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.maintenance.checking import check_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.tables import artifacts, sources
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload

CALLERS = 4
MANY = 64
HEALTH_S = 20.0  # beside other tests
QUESTION = {"problem": PROBLEM.text}


class Load:
    """Callers that ask without a pause, and what they were answered."""

    def __init__(self, address: httpx.URL) -> None:
        self._address = address
        self._answers: Queue[httpx.Response] = Queue()
        self._stop = threading.Event()
        self.unexpected: list[httpx.Response] = []

    def ask(self) -> None:
        """Ask until the test ends."""
        with httpx.Client(base_url=self._address, timeout=60) as client:
            while not self._stop.is_set():
                self._answers.put(client.post("/v1/resolve", json=QUESTION))
                self._answers.put(client.get("/v1/records?limit=1"))

    def until(self, is_wanted: Callable[[httpx.Response], bool]) -> None:
        """Wait for an answer, and keep those that no fault explains."""
        while True:
            answer = self._answers.get(timeout=60)
            if not (answer.is_success or is_failure_of_the_store(answer)):
                self.unexpected.append(answer)
            if is_wanted(answer):
                return

    def end(self) -> None:
        """Let the callers stop."""
        self._stop.set()


def is_failure_of_the_store(answer: httpx.Response) -> bool:
    return (
        answer.status_code == 503
        and answer.headers["Content-Type"] == "application/problem+json"
        and answer.json()["type"] == "urn:gemm-tuner:problem:store-failed"
    )


def is_page(answer: httpx.Response) -> bool:
    return answer.is_success and answer.request.url.path == "/v1/records"


@pytest.mark.proof
def test_a_server_that_restarts_under_load_is_a_pause(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    own_postgres.run_sql("CREATE DATABASE fleet")
    settings = settings_of(own_postgres.url("fleet"), tmp_path)
    tune(settings.database_url)

    with served(settings) as client, ThreadPoolExecutor(CALLERS) as pool:
        load = Load(client.base_url)
        for _caller in range(CALLERS):
            pool.submit(load.ask)
        try:
            load.until(is_page)
            for how in (signal.SIGINT, signal.SIGQUIT):
                own_postgres.stop(how)
                load.until(is_failure_of_the_store)
                assert client.get("/readyz").status_code == 503
                own_postgres.start()
                load.until(is_page)
        finally:
            load.end()

        answer = client.post("/v1/resolve", json=QUESTION)

    assert load.unexpected == []
    assert answer.json()["verdict"]["artifact"]["sha256"] == make_artifact().sha256


@pytest.mark.proof
def test_a_server_that_hangs_keeps_no_health_check_waiting(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    own_postgres.run_sql("CREATE DATABASE fleet")
    settings = settings_of(own_postgres.url("fleet"), tmp_path)
    tune(settings.database_url)

    with served(settings) as client, ThreadPoolExecutor(MANY) as pool:

        def ask(_number: int) -> int:
            return httpx.get(f"{client.base_url}/v1/records", timeout=60).status_code

        with own_postgres.frozen():
            waiting = [pool.submit(ask, number) for number in range(MANY)]
            for _look in range(20):
                begin_s = time.monotonic()
                assert client.get("/healthz").is_success
                assert time.monotonic() - begin_s < HEALTH_S
        statuses = {each.result() for each in waiting}
        answer = client.post("/v1/resolve", json=QUESTION)

    assert statuses <= {200, 429, 503}
    assert answer.json()["verdict"]["artifact"]["sha256"] == make_artifact().sha256


@pytest.mark.proof
def test_connections_that_the_server_ends_cost_no_answer(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    own_postgres.run_sql("CREATE DATABASE fleet")
    settings = settings_of(own_postgres.url("fleet"), tmp_path)
    tune(settings.database_url)

    with served(settings) as client:
        client.get("/v1/records")
        own_postgres.run_sql(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
            "WHERE application_name = 'gemm-tuner'"
        )
        answer = client.get("/v1/records")

    assert answer.status_code == 200


def test_what_a_killed_writer_left_is_served_whole_or_not_at_all(
    settings: Settings, own_client: httpx.Client
) -> None:
    writer = start_writer(settings.database_url, 1, 1_000_000)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(5)]
    own_client.post("/v1/resolve", json=QUESTION)

    writer.kill()
    confirmed += [int(line) for line in writer.communicate()[0].splitlines()]

    verdict = own_client.post("/v1/resolve", json=QUESTION).json()["verdict"]
    served_binary = own_client.get(verdict["artifact"]["url"]).content
    assert sha256(served_binary).hexdigest() == verdict["artifact"]["sha256"]
    for minute in confirmed:
        binary = written_binary(minute)
        kept = own_client.get(f"/v1/artifacts/sha256/{make_artifact(binary).sha256}")
        assert kept.content == binary


def test_a_service_answers_beside_a_full_disk(
    databases: Databases, own_client: httpx.Client, engine: Engine
) -> None:
    repository, seed = Repository(engine), random.Random(0)
    engine.dispose()  # a server bounds only connections that begin now
    with databases.full_disk(2**21):
        with pytest.raises(StoreFailed):
            fill(repository, seed)
        verdict = own_client.post("/v1/resolve", json=QUESTION).json()["verdict"]
        binary = own_client.get(verdict["artifact"]["url"]).content
    engine.dispose()
    repository.add_trial(make_failed_trial(minute=1))

    assert binary == b"\x7fELF sample"
    assert len(own_client.get("/v1/records").json()["records"]) == 2


def fill(repository: Repository, seed: random.Random) -> None:
    """Add kernels until the store refuses one."""
    while True:
        add_build(repository, seed.randbytes(100_000))


def test_a_clock_that_jumps_moves_days_and_no_numbers(
    settings: Settings, repository: Repository
) -> None:
    resolver = Resolver(
        repository=repository,
        key_pair=KeyPair.load_or_create(settings.signing_key_path),
        lifetime=timedelta(days=7),
        answers=Answers(lambda: None),
        count_miss=lambda _asked: None,
    )
    now = datetime(2026, 11, 23, tzinfo=UTC)

    serials = []
    for jump in (timedelta(), timedelta(days=4000), timedelta(days=-4000)):
        repository.add_trial(make_trial(minute=round(jump.total_seconds() / 60) + 1))
        answer = json.loads(resolver.answer(Asked.of(PROBLEM, CPU, CONTEXT), now + jump).content)
        payload = VerdictPayload.model_validate_json(b64decode(answer["signed"]["payload"]))
        assert (payload.issued_at, payload.expires_at) == (
            now + jump,
            now + jump + timedelta(days=7),
        )
        serials.append(payload.serial)

    assert serials == sorted(set(serials))


@pytest.mark.parametrize(
    ("statement", "statuses"),
    [
        ("update artifacts set attestation = 'x'", {200, 503}),
        ("update artifacts set compressed_binary = 'x'", {200, 503}),
        ("update verdicts set attestation = 'x'", {200, 503}),
        ("update verdicts set serial = 'x'", {503}),
        ("update verdicts set newest = 'x'", {200, 503}),
        ("update verdict_state set changes = 'x'", {200, 503}),
        ("update sources set compressed_text = 'x'", {200, 503}),
    ],
)
def test_values_of_another_type_are_no_fault_of_the_service(
    tmp_path: Path, statement: str, statuses: set[int]
) -> None:
    # No column of PostgreSQL holds another type than its own.
    settings = settings_of(f"sqlite:///{tmp_path}/store.sqlite3", tmp_path)
    tune(settings.database_url)
    engine = open_database(settings.database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()

    with served(settings) as client:
        resolved = client.post("/v1/resolve", json={"problem": PROBLEM.text})
        others = [
            client.get(path).status_code
            for path in (
                f"/v1/artifacts/sha256/{make_artifact().sha256}",
                f"/v1/artifacts/sha256/{make_artifact().sha256}/source",
                "/v1/revocations",
                "/readyz",
            )
        ]

    assert resolved.status_code in statuses
    assert not {500} & {resolved.status_code, *others}


def test_a_source_that_is_not_the_kernels_is_not_shown(settings: Settings) -> None:
    engine = open_database(settings.database_url)
    other = b"// innocent"
    digest = sha256(other).hexdigest()
    with engine.begin() as connection:
        connection.execute(
            insert(sources).values(sha256=digest, compressed_text=zlib.compress(other))
        )
        connection.execute(update(artifacts).values(source_sha256=digest))
    report = check_database(engine, lambda _table, _done, _total: None)
    engine.dispose()

    with served(settings) as client:
        answer = client.get(f"/v1/artifacts/sha256/{make_artifact().sha256}/source")

    assert answer.status_code == 503
    assert "another source" in answer.json()["detail"]
    assert [one for one in report.damages if "another source" in one]
