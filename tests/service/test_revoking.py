"""Revoking by HTTP: for holders of tokens with the scope `admin`, and noted in the audit log."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from gemm_tuner_service.clients.peers import Proxies
from gemm_tuner_service.routes import revocations
from gemm_tuner_service.settings import Settings
from samples import PROBLEM, make_artifact
from serving import served
from sqlalchemy import Engine, insert

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.revocation import Revocations
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import revocations as revocations_table
from gemm_tuner.store.tokens import Tokens
from gemm_tuner.trust.revocations import sign_revocations

FROM_ELSEWHERE = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}
KERNEL = make_artifact().sha256
KEY = "0123456789abcdef"
WHY = {"reason": "it computes nonsense"}


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a token, and how they ask."""

    client: httpx.Client
    token: str
    name: str

    def revoke(self, subject: str, why: object = WHY) -> httpx.Response:
        return self._ask("PUT", f"/v1/revocations/{subject}", json=why)

    def lift(self, subject: str, reason: str | None = "it was the compiler") -> httpx.Response:
        params = {} if reason is None else {"reason": reason}
        return self._ask("DELETE", f"/v1/revocations/{subject}", params=params)

    def kernel(self) -> object:
        """Return the kernel that the service names for the problem of the store."""
        answer = self._ask("POST", "/v1/resolve", json={"problem": PROBLEM.text})
        artifact = answer.raise_for_status().json()["verdict"]["artifact"]
        return artifact and artifact["sha256"]

    def _ask(self, method: str, path: str, **content: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}", **FROM_ELSEWHERE}
        return self.client.request(method, path, headers=headers, **content)  # type: ignore[arg-type]


@pytest.fixture
def holders(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Holder, Holder]]:
    """Yield an administrator, and someone who may only resolve, of a service that looks always."""
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    tokens = Tokens(engine)
    both = ((Scope.ADMIN, Scope.RESOLVE), (Scope.RESOLVE,))
    made = [tokens.create("a", scopes, actor="test", now=datetime.now(UTC)) for scopes in both]
    with served(replace(settings, proxies=Proxies.parse(["127.0.0.1"]))) as client:
        first, second = (
            Holder(client, secret.text, f"token {token.id} (a)") for token, secret in made
        )
        yield first, second


def test_a_kernel_is_revoked_at_once_and_comes_back(holders: tuple[Holder, Holder]) -> None:
    admin, other = holders
    assert other.kernel() == KERNEL

    assert admin.revoke(KERNEL).status_code == 201
    assert other.kernel() is None
    assert admin.revoke(KERNEL).status_code == 200

    assert admin.lift(KERNEL).status_code == 204
    assert other.kernel() == KERNEL
    assert admin.lift(KERNEL).status_code == 404


def test_the_audit_log_says_who_did_it(holders: tuple[Holder, Holder], engine: Engine) -> None:
    admin, _other = holders

    admin.revoke(KEY)
    admin.lift(KEY)

    revoked, lifted = AuditLog(engine).newest(2)
    assert (revoked.actor, revoked.subject) == (admin.name, KEY)
    assert WHY["reason"] in revoked.detail
    assert (lifted.actor, lifted.subject) == (admin.name, KEY)
    assert "it was the compiler" in lifted.detail


def test_who_may_only_resolve_revokes_nothing(
    holders: tuple[Holder, Holder], client: httpx.Client
) -> None:
    _admin, other = holders

    assert other.revoke(KERNEL).status_code == 403
    assert other.lift(KERNEL).status_code == 403
    assert client.put(f"/v1/revocations/{KERNEL}", json=WHY).status_code == 403
    assert other.kernel() == KERNEL


@pytest.mark.parametrize("subject", ["0" * 63, "0" * 65, "0" * 32, "G" * 16, "%00" * 16])
def test_what_cannot_be_revoked_is_refused(holders: tuple[Holder, Holder], subject: str) -> None:
    admin, _other = holders

    assert admin.revoke(subject).status_code == 422
    assert admin.lift(subject).status_code == 422


@pytest.mark.parametrize(
    "why",
    [
        {},
        {"reason": ""},
        {"reason": "x" * 401},
        {"reason": "two\nlines"},
        {"reason": "a\x1b[2J"},
        {"reason": "\x00"},
        {"reason": "   "},
        {"reason": "\u202egnp.exe"},
        {"reason": "a\u2028b"},
        {"reason": 1},
        {"reason": "so", "subject": KERNEL},
        [],
    ],
)
def test_a_revocation_needs_a_reason(holders: tuple[Holder, Holder], why: object) -> None:
    admin, other = holders

    assert admin.revoke(KERNEL, why).status_code == 422
    assert other.kernel() == KERNEL


@pytest.mark.parametrize("reason", [None, "", "x" * 401, "two\nlines", "\x00"])
def test_lifting_needs_a_reason(holders: tuple[Holder, Holder], reason: str | None) -> None:
    admin, _other = holders
    admin.revoke(KERNEL)

    assert admin.lift(KERNEL, reason).status_code == 422
    assert admin.kernel() is None


def test_the_list_is_signed_once_for_each_change(
    own_client: httpx.Client, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[int] = []
    sign = sign_revocations

    def count(revoked: Revocations, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        signed.append(revoked.number)
        return sign(revoked, *arguments, **keywords)

    monkeypatch.setattr(revocations, "sign_revocations", count)
    first = [own_client.get("/v1/revocations").json() for _ask in range(3)]
    repository.revoke(KEY, reason="stolen", actor="me", now=datetime.now(UTC))
    second = [own_client.get("/v1/revocations").json() for _ask in range(3)]

    assert len(signed) == 2
    assert first[0] == first[1] == first[2] != second[0] == second[1] == second[2]


@pytest.mark.parametrize(
    ("number", "subject", "told"),
    [(1, "x", "neither a kernel nor a signing key"), (-1, "ab" * 32, "the number -1")],
)
def test_a_damaged_revocation_is_told(
    own_client: httpx.Client, engine: Engine, number: int, subject: str, told: str
) -> None:
    with engine.begin() as connection:
        connection.execute(
            insert(revocations_table).values(
                number=number, subject=subject, reason="", created_at="2026-01-01", is_lifted=False
            )
        )

    answer = own_client.get("/v1/revocations")

    assert answer.status_code == 503
    assert told in answer.json()["detail"]
