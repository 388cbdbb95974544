"""What workers bring: kept, bounded, never served, and seen by nobody else."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from io import StringIO

import httpx
import pytest
from gemm_tuner_service.bounds import MAX_BATCH, MAX_UPLOAD_BYTES
from gemm_tuner_service.clients.peers import Proxies
from gemm_tuner_service.settings import Settings
from samples import make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.store import contributions as contributions_module
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.contributions import Contributions
from gemm_tuner.store.exchange import export_records
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin
from gemm_tuner.store.tokens import Tokens
from gemm_tuner.store.wire.record import dump_record

SECRET = Problem.parse("f32 77x96x112 nk relu")
RANGE = Problem.parse("f32 64..128x96x112 nk relu")
BINARY = b"\x7fELF of a worker"
DIGEST = sha256(BINARY).hexdigest()
FROM_ELSEWHERE = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a token, and how they ask."""

    client: httpx.Client
    token: str
    token_id: str

    def ask(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json" if "resolve" in path else "application/x-ndjson",
            **FROM_ELSEWHERE,
        }
        return self.client.request(method, path, content=content, headers=headers)

    def send(self, *lines: str) -> httpx.Response:
        return self.ask("POST", "/v1/records", "\n".join(lines).encode())


@pytest.fixture
def holders(settings: Settings, engine: Engine) -> Iterator[tuple[Holder, Holder]]:
    store = Tokens(engine)
    scopes = (Scope.RESOLVE, Scope.RECORDS_WRITE)
    made = [store.create(name, scopes, actor="test", now=datetime.now(UTC)) for name in ("a", "b")]
    with served(replace(settings, proxies=Proxies.parse(["127.0.0.1"]))) as client:
        first, second = (Holder(client, secret.text, token.id) for token, secret in made)
        yield first, second


def records(count: int, problem: Problem = SECRET) -> list[str]:
    trials = [
        replace(make_trial(), problem=problem, created_at=datetime(2026, 1, 1, 0, n, tzinfo=UTC))
        for n in range(count)
    ]
    return [dump_record(trial) for trial in trials]


def test_records_are_kept_and_known_when_they_come_again(holders: tuple[Holder, Holder]) -> None:
    worker, _other = holders

    first = worker.send(*records(3))
    again = worker.send(*records(4))

    assert (first.status_code, first.json()) == (200, {"added": 3, "known": 0})
    assert (again.status_code, again.json()) == (200, {"added": 1, "known": 3})
    page = worker.ask("GET", "/v1/contributions?limit=3").json()
    assert [each["kind"] for each in page["contributions"]] == ["record"] * 3
    rest = worker.ask("GET", f"/v1/contributions?cursor={page['next_cursor']}").json()
    assert (len(rest["contributions"]), rest["next_cursor"]) == (1, None)


def test_a_line_that_is_no_record_keeps_all_out_and_is_named(
    holders: tuple[Holder, Holder],
) -> None:
    worker, _other = holders
    good = records(1)[0]

    answer = worker.send(good, "", good.replace('"threads":1', '"threads":"x"'), "{", "\x00")

    assert answer.status_code == 422
    document = answer.json()
    assert document["type"] == "urn:gemm-tuner:problem:invalid-records"
    assert [fault["line"] for fault in document["errors"]] == [3, 4, 5]
    assert document["errors"][0]["pointer"].endswith("/threads")
    assert document["errors"][1]["pointer"] == ""
    assert worker.ask("GET", "/v1/contributions").json()["contributions"] == []


def test_bytes_that_are_no_text_are_a_fault_of_their_line(holders: tuple[Holder, Holder]) -> None:
    answer = holders[0].ask("POST", "/v1/records", records(1)[0].encode() + b"\n\xff\xfe")

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["line"] == 2


def test_too_much_at_once_is_refused(holders: tuple[Holder, Holder]) -> None:
    worker, _other = holders

    many = worker.ask("POST", "/v1/records", b"{}\n" * (MAX_BATCH + 1))
    long = worker.ask("POST", "/v1/records", b" " * (MAX_UPLOAD_BYTES + 1))

    assert many.status_code == long.status_code == 413
    assert worker.ask("POST", "/v1/records", b"").json() == {"added": 0, "known": 0}


def test_an_artifact_is_kept_under_its_own_digest_alone(holders: tuple[Holder, Holder]) -> None:
    worker, _other = holders
    path = f"/v1/artifacts/sha256/{DIGEST}"

    assert worker.ask("PUT", path, BINARY).status_code == 201
    assert worker.ask("PUT", path, BINARY).status_code == 200
    wrong = worker.ask("PUT", path, BINARY + b"x")
    assert wrong.status_code == 422
    assert wrong.json()["type"] == "urn:gemm-tuner:problem:digest-mismatch"
    assert worker.ask("PUT", "/v1/artifacts/sha256/%2e%2e", BINARY).status_code == 422


def test_a_token_holds_no_more_than_it_may(
    holders: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = holders
    monkeypatch.setattr(contributions_module, "MAX_BYTES_OF_OWNER", 40)  # once, not twice
    path = f"/v1/artifacts/sha256/{DIGEST}"
    assert worker.ask("PUT", path, BINARY).status_code == 201

    refused = worker.send(*records(1))

    assert refused.status_code == 413
    assert refused.json()["type"] == "urn:gemm-tuner:problem:contributions-full"
    assert worker.ask("PUT", path, BINARY).status_code == 200, "what is known takes no room"
    assert worker.ask("GET", "/v1/contributions").text.count("sha256") == 1
    assert other.ask("PUT", path, BINARY).status_code == 201


def _seen_by(holder: Holder, repository: Repository) -> list[bytes]:
    """Return everything that could tell of another's problem."""
    exported = StringIO()
    export_records(repository, exported)
    question = {"m": SECRET.m.exact, "n": SECRET.n, "k": SECRET.k, "epilogue": "relu"}
    query = "&".join(f"{name}={value}" for name, value in question.items())
    answers = [
        holder.ask("GET", "/v1/records?limit=1000"),
        holder.ask("GET", f"/v1/kernels?{query}"),
        holder.ask("POST", "/v1/resolve", b'{"problem": "%s"}' % SECRET.text.encode()),
        holder.ask("POST", "/v1/resolve:batch", b'{"problems": ["%s"]}' % SECRET.text.encode()),
        holder.ask("GET", f"/v1/artifacts/sha256/{DIGEST}"),
        holder.ask("GET", "/v1/contributions"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404, 200]
    return [exported.getvalue().encode(), *(answer.content for answer in answers)]


def test_what_one_token_contributed_changes_nothing_that_another_sees(
    holders: tuple[Holder, Holder], repository: Repository
) -> None:
    worker, other = holders
    before = _seen_by(other, repository)

    assert worker.send(*records(2), *records(2, RANGE)).is_success
    assert worker.ask("PUT", f"/v1/artifacts/sha256/{DIGEST}", BINARY).is_success

    assert _seen_by(other, repository) == before
    # Nor can the other learn of it by sending the same.
    assert other.send(*records(2)).json() == {"added": 2, "known": 0}
    assert other.ask("PUT", f"/v1/artifacts/sha256/{DIGEST}", BINARY).status_code == 201


def test_what_was_contributed_is_not_served_to_its_owner_either(
    holders: tuple[Holder, Holder], repository: Repository
) -> None:
    worker, _other = holders
    before = _seen_by(worker, repository)[:-1]

    worker.send(*records(2), *records(2, RANGE))
    worker.ask("PUT", f"/v1/artifacts/sha256/{DIGEST}", BINARY)

    assert _seen_by(worker, repository)[:-1] == before


def test_what_is_accepted_is_imported_and_still_not_served(
    holders: tuple[Holder, Holder], repository: Repository, engine: Engine
) -> None:
    worker, other = holders
    worker.send(*records(3))
    other.send(*records(1, RANGE))
    store = Contributions(engine)

    added = store.accept(worker.token_id, actor="me", now=datetime.now(UTC))

    def found(origin: Origin) -> tuple[Trial, ...]:
        return repository.trials(problem=SECRET, origin=origin)

    assert added == len(found(Origin.IMPORTED)) == 3
    assert found(Origin.MEASURED) == ()
    assert [each.owner for each in store.owners()] == [other.token_id]
    answer = worker.ask("POST", "/v1/resolve", b'{"problem": "%s"}' % SECRET.text.encode())
    assert answer.json()["verdict"]["artifact"] is None


def test_what_is_dropped_is_gone(holders: tuple[Holder, Holder], engine: Engine) -> None:
    worker, _other = holders
    worker.send(*records(3))
    store = Contributions(engine)

    assert store.drop(worker.token_id, actor="me", now=datetime.now(UTC)) == 3
    assert store.drop(worker.token_id, actor="me", now=datetime.now(UTC)) == 0
    assert store.owners() == ()


def test_a_damaged_contribution_is_told(holders: tuple[Holder, Holder], engine: Engine) -> None:
    worker, other = holders
    worker.send(*records(1))
    with engine.begin() as connection:
        connection.exec_driver_sql("update contributions set kind = 'other'")

    answer = worker.ask("GET", "/v1/contributions")

    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:gemm-tuner:problem:store-failed"
    assert other.ask("GET", "/v1/contributions").status_code == 200


def test_the_audit_log_names_the_token(holders: tuple[Holder, Holder], engine: Engine) -> None:
    worker, _other = holders
    worker.send(*records(3))
    worker.send(*records(3))
    Contributions(engine).accept(worker.token_id, actor="me", now=datetime.now(UTC))

    contributed, accepted = AuditLog(engine).newest(2)

    assert contributed.actor == f"token {worker.token_id} (a)"
    assert (contributed.action, contributed.subject) == ("record contributed", "3 new")
    assert (accepted.actor, accepted.action) == ("me", "contributions accepted")


def test_loopback_alone_does_not_permit_it(client: httpx.Client) -> None:
    assert client.post("/v1/records", content=records(1)[0]).status_code == 403
    assert client.put(f"/v1/artifacts/sha256/{DIGEST}", content=BINARY).status_code == 403
    assert client.get("/v1/contributions").status_code == 403
