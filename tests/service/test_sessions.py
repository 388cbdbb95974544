"""Signing in by a browser: from a token to a session, what it is good for, and its end."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import httpx
import pytest
from gemm_tuner_service.clients.peers import Proxies
from gemm_tuner_service.settings import Settings
from pages import Page
from samples import PROBLEM
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.tokens import Tokens

KEY = problem_id(PROBLEM)


@pytest.fixture
def signing_in(settings: Settings, engine: Engine) -> Iterator[tuple[httpx.Client, Tokens]]:
    """Yield a client from another machine, behind a proxy that speaks https."""
    with served(replace(settings, proxies=Proxies.parse(["127.0.0.1"]))) as client:
        client.headers.update({"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"})
        yield client, Tokens(engine)


def _token(tokens: Tokens, *scopes: Scope) -> tuple[str, str]:
    token, secret = tokens.create("ci", scopes, actor="t", now=datetime.now(UTC))
    return token.id, secret.text


def test_a_person_signs_in_with_a_token_and_out_again(
    signing_in: tuple[httpx.Client, Tokens],
) -> None:
    client, tokens = signing_in
    token_id, secret = _token(tokens, Scope.RESOLVE)

    refused = client.get(f"/problems/{KEY}?threads=1")
    form = Page(refused)
    hidden = re.findall(r'name="wanted" value="([^"]*)"', refused.text)
    answer = client.post("/sign-in", data={"token": secret, "wanted": hidden[0]})
    cookie = answer.headers["Set-Cookie"]
    session = {"Cookie": cookie.partition(";")[0]}

    assert refused.status_code == 401
    assert form.elements["form"] == 1
    assert answer.status_code == 303
    assert answer.headers["Location"] == f"/problems/{KEY}?threads=1"
    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/"} <= set(cookie.split("; "))
    assert cookie.startswith("__Host-")
    assert secret not in cookie
    assert client.get(answer.headers["Location"], headers=session).status_code == 200
    assert token_id in client.get("/", headers=session).text
    # A session is good for pages alone.
    assert client.get("/v1/records", headers=session).status_code == 401
    assert client.get("/jobs", headers=session).status_code == 403

    out = client.post("/sign-out", headers=session)
    assert out.status_code == 303
    assert all("Max-Age=0" in each for each in out.headers.get_list("set-cookie"))


def test_a_session_ends_with_its_token(
    signing_in: tuple[httpx.Client, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner_service.clients.callers.TOKEN_KNOWN_S", 0.0)
    client, tokens = signing_in
    token_id, secret = _token(tokens, Scope.RESOLVE)
    cookie = client.post("/sign-in", data={"token": secret}).headers["Set-Cookie"].partition(";")[0]

    before = client.get("/", headers={"Cookie": cookie})
    tokens.revoke(token_id, actor="t", now=datetime.now(UTC))
    after = client.get("/", headers={"Cookie": cookie})

    assert (before.status_code, after.status_code) == (200, 401)


@pytest.mark.parametrize("change", ["x", "0.9999999999", "longer", "none"])
def test_a_session_that_others_made_is_none(
    signing_in: tuple[httpx.Client, Tokens], change: str
) -> None:
    client, tokens = signing_in
    secret = _token(tokens, Scope.RESOLVE)[1]
    cookie = client.post("/sign-in", data={"token": secret}).headers["Set-Cookie"].partition(";")[0]
    name, _is, session = cookie.partition("=")
    token_id, ends_at, code = session.split(".")
    forged = {
        "x": f"{token_id}.{ends_at}.{code[:-1]}x",
        "0.9999999999": f"{token_id}.9999999999.{code}",
        "longer": session * 200,
        "none": "",
    }[change]

    assert client.get("/", headers={"Cookie": f"{name}={forged}"}).status_code == 401


def test_a_wrong_token_and_another_site_sign_in_nobody(
    signing_in: tuple[httpx.Client, Tokens],
) -> None:
    client, tokens = signing_in
    secret = _token(tokens, Scope.RESOLVE)[1]

    for fields in ({}, {"token": "gt_x"}, {"token": "<b>"}, {"token": secret + "x"}):
        answer = client.post("/sign-in", data=fields)
        assert answer.status_code == 401
        assert "Set-Cookie" not in answer.headers
        assert 'name="token"' in answer.text
    for headers in ({"Origin": "https://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = client.post("/sign-in", data={"token": secret}, headers=headers)
        assert answer.status_code == 403
        assert "Set-Cookie" not in answer.headers
    assert client.post("/sign-in", content=b"\xff" * 10).status_code == 422
    assert client.post("/sign-in", content=b"a=1&" * 99).status_code == 422


@pytest.mark.parametrize(
    "wanted",
    [
        "https://elsewhere.example/",
        "//elsewhere.example",
        "/\\elsewhere",
        "///cpus/x",
        "/healthz",
        "",
    ],
)
def test_signing_in_leads_to_no_other_place(
    signing_in: tuple[httpx.Client, Tokens], wanted: str
) -> None:
    client, tokens = signing_in
    secret = _token(tokens, Scope.RESOLVE)[1]

    answer = client.post("/sign-in", data={"token": secret, "wanted": wanted})

    assert answer.headers["Location"] == "/"


def test_a_session_in_clear_text_is_refused(signing_in: tuple[httpx.Client, Tokens]) -> None:
    client, tokens = signing_in
    secret = _token(tokens, Scope.RESOLVE)[1]
    cookie = client.post("/sign-in", data={"token": secret}).headers["Set-Cookie"].partition(";")[0]
    clear = {"X-Forwarded-Proto": "http"}

    assert client.get("/", headers={"Cookie": cookie, **clear}).status_code == 403
    answer = client.post("/sign-in", data={"token": secret}, headers=clear)
    assert answer.status_code == 403
    assert "revoke it" in answer.text
