"""Who may ask what: tokens, scopes, and callers without a token."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gemm_tuner_service.app import create_app
from gemm_tuner_service.clients.callers import Callers, NotAuthenticated
from gemm_tuner_service.clients.client_limits import ClientLimits, TooManyRequests
from gemm_tuner_service.clients.peers import Peer, Proxies
from gemm_tuner_service.clients.sessions import Sessions
from gemm_tuner_service.routing import RULES, SCOPES_OF_LOOPBACK, rule_of
from gemm_tuner_service.settings import Settings
from samples import PROBLEM
from serving import served
from sqlalchemy import Engine
from starlette.routing import Route

from gemm_tuner.domain.access import Scope, TokenSecret
from gemm_tuner.store.tokens import Tokens
from gemm_tuner.trust.keys import KeyPair

SESSIONS = Sessions(KeyPair(private_key=Ed25519PrivateKey.generate()))
QUESTION = {"problem": PROBLEM.text}
FROM_ELSEWHERE = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}


@dataclass(frozen=True, slots=True)
class Remote:
    """A service behind a proxy, as its callers on other machines meet it."""

    client: httpx.Client
    tokens: Tokens

    def token(self, *scopes: Scope, lifetime: timedelta | None = None) -> str:
        now = datetime.now(UTC) - timedelta(hours=1)
        return self.tokens.create("ci", scopes, actor="test", now=now, lifetime=lifetime)[1].text

    def ask(self, authorization: str | None, path: str = "/v1/resolve") -> httpx.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        if path == "/v1/resolve":
            return self.client.post(path, json=QUESTION, headers=headers)
        return self.client.get(path, headers=headers)


@pytest.fixture
def remote(settings: Settings, engine: Engine) -> Iterator[Remote]:
    settings = _behind_proxy(settings)
    with served(settings) as client:
        client.headers.update(FROM_ELSEWHERE)
        yield Remote(client, Tokens(engine))


def _behind_proxy(settings: Settings) -> Settings:
    return Settings(
        database_url=settings.database_url,
        signing_key_path=settings.signing_key_path,
        default_cpu=settings.default_cpu,
        proxies=Proxies.parse(["127.0.0.1"]),
    )


def test_a_token_with_the_scope_is_answered(remote: Remote) -> None:
    answer = remote.ask(f"Bearer {remote.token(Scope.RESOLVE)}")

    assert answer.status_code == 200
    assert answer.json()["verdict"]["decision"] == "tuned"


def test_what_does_not_count_is_refused_always_the_same(remote: Remote) -> None:
    revoked = remote.token(Scope.RESOLVE)
    remote.tokens.revoke(remote.tokens.all()[-1].id, actor="test", now=datetime.now(UTC))
    wrong = (
        None,
        "Bearer",
        "Bearer gt_short",
        "Basic Z3Q6eA==",
        f"Bearer {TokenSecret.generate().text}",
        f"Bearer {revoked}",
        f"Bearer {remote.token(Scope.RESOLVE, lifetime=timedelta(minutes=1))}",
        f"Bearer {remote.token(Scope.RESOLVE)}x",
        f"{remote.token(Scope.RESOLVE)}",
    )

    answers = [remote.ask(each) for each in wrong]

    assert {answer.status_code for answer in answers} == {401}
    assert {answer.headers["WWW-Authenticate"] for answer in answers} == {
        'Bearer realm="gemm-tuner"'
    }
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["type"] == "urn:gemm-tuner:problem:unauthorized"


def test_two_tokens_at_once_are_none(remote: Remote) -> None:
    header = ("Authorization", f"Bearer {remote.token(Scope.RESOLVE)}")

    answer = remote.client.post("/v1/resolve", json=QUESTION, headers=[header, header])

    assert answer.status_code == 401


@pytest.mark.parametrize("scope", list(Scope))
def test_each_route_needs_its_scope(remote: Remote, scope: Scope) -> None:
    token = f"Bearer {remote.token(scope)}"

    for rule in RULES:
        path = re.sub(r"{\w+}", "0" * 64, rule.path)
        answer = remote.client.request(rule.method, path, headers={"Authorization": token})
        assert (answer.status_code == 403) == (rule.scope not in {None, scope}), rule
        if answer.status_code == 403:
            told = answer.text if rule.is_page else answer.json()["detail"]
            assert f"the scope {rule.scope}." in told


def test_everyone_may_see_what_is_public(remote: Remote) -> None:
    for rule in RULES:
        if rule.scope is None and rule.method == "GET":
            assert remote.client.request(rule.method, rule.path).is_success, rule


def test_without_a_token_nothing_else_answers(remote: Remote) -> None:
    for rule in RULES:
        if rule.scope is not None:
            path = re.sub(r"{\w+}", "0" * 64, rule.path)
            assert remote.client.request(rule.method, path).status_code == 401, rule
    for path in ("/v1/nothing", "/v1/records%0a", "//v1/records", "/v1/records/"):
        assert remote.client.get(path).status_code == 401, path


def test_every_route_of_the_service_has_a_row(settings: Settings) -> None:
    routes = [route for route in create_app(settings).routes if isinstance(route, Route)]

    rows = {(rule.method, rule.path) for rule in RULES}
    found = {(method, each.path) for each in routes for method in each.methods or ()}
    assert {each for each in found if each[0] != "HEAD"} <= rows


@pytest.mark.parametrize(
    "path", ["/v1/records%0a", "/v1/records/", "/v1/artifacts/sha256/a/b", "/v1//records"]
)
def test_what_only_looks_like_a_route_is_none(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_parameter_is_one_part_of_a_path() -> None:
    assert rule_of("GET", "/v1/artifacts/sha256/ab") is not None
    assert rule_of("GET", "/v1/artifacts/sha256/ab/source") is not None
    assert rule_of("GET", "/v1/artifacts/sha256/ab\n") is not None  # the route itself refuses it
    assert rule_of("GET", "/v1/artifacts/sha256/") is None
    assert rule_of("DELETE", "/v1/artifacts/sha256/ab") is None


def test_a_user_of_this_machine_asks_without_a_token(settings: Settings, tmp_path: Path) -> None:
    with served(settings) as client:
        assert client.post("/v1/resolve", json=QUESTION).is_success
        wrong = {"Authorization": f"Bearer {TokenSecret.generate().text}"}
        assert client.post("/v1/resolve", json=QUESTION, headers=wrong).status_code == 401
    with served(settings, path=tmp_path / "s") as client:
        assert client.post("/v1/resolve", json=QUESTION).is_success


def test_a_proxy_that_was_not_named_makes_nobody_local(settings: Settings, tmp_path: Path) -> None:
    for path in (None, tmp_path / "s"):
        with served(settings, path=path) as client:
            for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Forwarded-Host", "Via"):
                answer = client.post("/v1/resolve", json=QUESTION, headers={header: "127.0.0.1"})
                assert answer.status_code == 401, header


def test_a_web_site_does_not_read_what_a_user_of_this_machine_may(client: httpx.Client) -> None:
    for path in ("/v1/records", "/", "/metrics"):
        answer = client.get(path, headers={"Host": "evil.example"})
        assert answer.status_code == 401, path


@pytest.mark.parametrize("headers", [{}, {"X-Forwarded-Proto": "http"}])
def test_a_token_in_clear_text_is_refused_and_told(
    settings: Settings,
    engine: Engine,
    headers: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = Tokens(engine).create("ci", [Scope.RESOLVE], actor="t", now=datetime.now(UTC))[1].text
    with served(_behind_proxy(settings)) as client, caplog.at_level(logging.DEBUG):
        answer = client.post(
            "/v1/resolve",
            json=QUESTION,
            headers={
                "Authorization": f"Bearer {token}",
                "X-Forwarded-For": "203.0.113.7",
                **headers,
            },
        )

    assert answer.status_code == 403
    assert "revoke it" in answer.json()["detail"]
    assert "203.0.113.7 sent a token in clear text" in caplog.text
    assert token not in caplog.text


def test_no_log_shows_a_token(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = remote.token(Scope.RESOLVE), TokenSecret.generate().text

    with caplog.at_level(logging.DEBUG):
        answers = [remote.ask(f"Bearer {each}") for each in (good, bad)]

    assert [answer.status_code for answer in answers] == [200, 401]
    for token in (good, bad):
        ours = [each for each in caplog.records if not each.name.startswith("http")]
        assert not any(token in each.getMessage() for each in ours)
        assert not any(token in answer.text for answer in answers)


def _identify(callers: Callers, secret: TokenSecret, peer: Peer) -> str:
    import anyio  # noqa: PLC0415 - of this test alone

    scope = {"headers": [(b"authorization", f"Bearer {secret.text}".encode())]}

    async def identify() -> str:
        return (await callers.identify(scope, peer)).name

    return anyio.run(identify)


def test_a_revoked_token_counts_no_longer_than_it_is_remembered(engine: Engine) -> None:
    clock = [0.0]
    store = Tokens(engine)
    callers = Callers(store, Proxies(), ClientLimits(), SESSIONS, now_s=lambda: clock[0])
    token, secret = store.create("ci", [Scope.RESOLVE], actor="t", now=datetime.now(UTC))
    peer = Peer(key="a", name="a", is_private=True)

    assert _identify(callers, secret, peer) == f"token {token.id} (ci)"
    store.revoke(token.id, actor="t", now=datetime.now(UTC))
    clock[0] = 4.9
    _identify(callers, secret, peer)
    clock[0] = 5.0
    with pytest.raises(NotAuthenticated):
        _identify(callers, secret, peer)


def test_a_remembered_token_expires_in_time(engine: Engine) -> None:
    begin = datetime.now(UTC)
    now = [begin]
    store = Tokens(engine)
    callers = Callers(store, Proxies(), ClientLimits(), SESSIONS, now=lambda: now[0])
    lifetime = timedelta(seconds=2)
    secret = store.create("ci", [Scope.RESOLVE], actor="t", now=begin, lifetime=lifetime)[1]
    peer = Peer(key="a", name="a", is_private=True)

    _identify(callers, secret, peer)
    now[0] = begin + lifetime
    with pytest.raises(NotAuthenticated):
        _identify(callers, secret, peer)


def test_who_guesses_is_slowed_down_and_nobody_else(engine: Engine) -> None:
    store = Tokens(engine)
    callers = Callers(store, Proxies(), ClientLimits(1, now_s=lambda: 0.0), SESSIONS)
    thief = Peer(key="thief", name="thief", is_private=True)
    secret = store.create("ci", [Scope.RESOLVE], actor="t", now=datetime.now(UTC))[1]

    for _guess in range(100):
        with pytest.raises(NotAuthenticated):
            _identify(callers, TokenSecret.generate(), thief)
    with pytest.raises(TooManyRequests):
        _identify(callers, TokenSecret.generate(), thief)

    assert "ci" in _identify(callers, secret, Peer(key="honest", name="honest", is_private=True))


def test_loopback_may_not_change_anything() -> None:
    assert frozenset({Scope.RESOLVE, Scope.METRICS}) == SCOPES_OF_LOOPBACK
