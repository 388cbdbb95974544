"""Lock files and revocations: a locked kernel is loaded until it, or the key of it, is revoked."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copytree
from threading import Barrier
from typing import Any

import pytest
from gemm_tuner_service.answering.resolver import Resolver
from served import PROBLEM, Site, keep_trial
from starlette.types import ASGIApp, Receive, Scope, Send

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.client import revocations
from gemm_tuner.errors import SignatureInvalid
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel

Ask = Callable[[Client], object]


def _kernel(client: Client) -> object:
    return client.kernel(PROBLEM)


def _kernel_of_many(client: Client) -> object:
    return client.kernels([PROBLEM])[0]


def _layer(client: Client) -> object:
    return client.layer(32, 16, m=[8], epilogue="bias+relu").kernels[0]


class Later(datetime):
    """A clock that is far ahead."""

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        assert tz is UTC
        return datetime.now(UTC) + timedelta(days=60)


ways = pytest.mark.parametrize("ask", [_kernel, _kernel_of_many, _layer])


@pytest.fixture
def lock(site: Site, tmp_path: Path) -> Path:
    """Return a lock file, beside a cache directory with the kernel, but without revocations."""
    file = tmp_path / "gemm-tuner.lock"
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "first")
        client.kernel(PROBLEM)
        client.write_lock(file)
    copytree(tmp_path / "first" / "artifacts", tmp_path / "cache" / "artifacts")
    return file


@ways
def test_a_locked_kernel_that_was_revoked_is_not_taken_from_the_cache(
    ask: Ask, site: Site, build: Build, lock: Path, tmp_path: Path
) -> None:
    site.repository.revoke(build.artifact.sha256, reason="wrong", actor="me", now=datetime.now(UTC))

    with site.serving() as address:
        found = ask(Client(address, cache_dir=tmp_path / "cache", lock=lock))

    assert not isinstance(found, Kernel)


@ways
def test_a_locked_kernel_is_used_while_the_service_is_away_however_long(
    ask: Ask, site: Site, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.serving() as address:
        ask(Client(address, cache_dir=tmp_path / "cache", lock=lock))
    assert list((tmp_path / "cache" / "revocations").iterdir())

    monkeypatch.setattr(revocations, "datetime", Later)
    client = Client(address, cache_dir=tmp_path / "cache", lock=lock, frozen=True)

    assert isinstance(ask(client), Kernel)
    assert isinstance(ask(client), Kernel)


@ways
def test_nothing_is_locked_by_a_key_that_was_revoked(
    ask: Ask, site: Site, lock: Path, tmp_path: Path
) -> None:
    stolen = "0123456789abcdef"
    text = lock.read_text()
    lock.write_text(text.replace(site.key_pair.key_id, stolen))
    site.repository.revoke(stolen, reason="stolen", actor="me", now=datetime.now(UTC))

    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache", lock=lock)
        with pytest.raises(SignatureInvalid, match=f"{stolen}, which was revoked"):
            ask(client)


def test_a_locked_kernel_does_not_keep_another_answer_from_expiring(
    site: Site, build: Build, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=10, threads=2)
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache", lock=lock)
        assert isinstance(client.kernel(PROBLEM, threads=2), Kernel)
        assert isinstance(client.kernel(PROBLEM), Kernel)

    monkeypatch.setattr(revocations, "datetime", Later)

    assert isinstance(client.kernel(PROBLEM), Kernel)
    assert not isinstance(client.kernel(PROBLEM, threads=2), Kernel)


class _SlowList:
    """Stands around the service, which takes its time for the list of revocations."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/v1/revocations":
            await asyncio.sleep(0.2)
        await self._app(scope, receive, send)


def test_of_many_that_ask_at_once_none_gets_a_kernel_that_was_revoked(
    site: Site, build: Build, lock: Path, tmp_path: Path
) -> None:
    site.repository.revoke(build.artifact.sha256, reason="wrong", actor="me", now=datetime.now(UTC))

    with site.serving(around=_SlowList) as address:
        client = Client(address, cache_dir=tmp_path / "cache", lock=lock)
        barrier = Barrier(2)

        def ask_one(ask: Ask) -> object:
            barrier.wait(30)
            return ask(client)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(ask_one, (_kernel, _layer)))

    assert not [one for one in found if isinstance(one, Kernel)]


def test_what_was_revoked_is_asked_for_once(
    site: Site, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        assert isinstance(client.kernel(PROBLEM), Kernel)
        site.repository.revoke(
            build.artifact.sha256, reason="wrong", actor="me", now=datetime.now(UTC)
        )
        with monkeypatch.context() as soon:
            soon.setattr(revocations, "ASK_EVERY_S", 0.0)
            client.kernel(PROBLEM, threads=2)  # asks for the list too
        resolved: list[str] = []
        look = Resolver.answer

        def count(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as it is
            resolved.append("asked")
            return look(*arguments, **keywords)

        monkeypatch.setattr(Resolver, "answer", count)
        found = {type(client.kernel(PROBLEM)) for _ask in range(5)}

    assert Kernel not in found
    assert len(resolved) <= 1
