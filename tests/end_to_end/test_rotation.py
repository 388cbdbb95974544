"""A new signing key: who believed the old one believes it, unless that was stolen."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path

import httpx
import pytest
from served import PROBLEM, Site

from gemm_tuner import Client
from gemm_tuner.cli.main import SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.client import revocations
from gemm_tuner.client.keys import KnownKeys
from gemm_tuner.domain.revocation import Revocations
from gemm_tuner.errors import SignatureInvalid, StoreFailed
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.revocations import sign_revocations
from gemm_tuner.trust.succession import rotate


@pytest.fixture
def turn_key(site: Site) -> Callable[..., None]:
    """Return how the owner of the service rotates its key."""

    def turn(*options: str) -> None:
        arguments = ["--key", str(site.settings.signing_key_path), *options]
        assert run(["keys", "rotate", *arguments, "--db", site.settings.database_url]) == 0

    return turn


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_remembered_key_leads_to_its_successors(
    site: Site, turn_key: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "first").kernel(PROBLEM)
    old = site.key_pair.key_id
    turn_key()
    turn_key()

    with site.serving(port=_port_of(address)):
        kernel = Client(address, cache_dir=tmp_path / "second").kernel(PROBLEM)
        layer = Client(address, cache_dir=tmp_path / "third").layer(
            32, 16, m=[8], epilogue="bias+relu"
        )

    assert isinstance(kernel, Kernel)
    assert isinstance(layer.kernels[0], Kernel)
    assert set(KnownKeys().of(address) or ()) == {site.key_pair.key_id} != {old}
    assert f"{site.key_pair.key_id} now, which {old} signed over" in caplog.text


def test_a_layer_is_had_with_a_succeeding_key(
    site: Site, turn_key: Callable[..., None], tmp_path: Path
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "first").kernel(PROBLEM)
    turn_key()

    with site.serving(port=_port_of(address)):
        layer = Client(address, cache_dir=tmp_path / "second").layer(
            32, 16, m=[8], epilogue="bias+relu"
        )

    assert isinstance(layer.kernels[0], Kernel)


def test_a_succeeding_key_that_cannot_be_remembered_is_believed_by_the_process(
    site: Site,
    turn_key: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "first").kernel(PROBLEM)
    old = site.key_pair.key_id
    turn_key()

    def full(path: Path, content: bytes) -> None:
        raise StoreFailed(f"{len(content)} bytes of {path}") from OSError(ENOSPC, "no space")

    with site.serving(port=_port_of(address)), monkeypatch.context() as patch:
        patch.setattr("gemm_tuner.client.keys.write_atomically", full)
        client = Client(address, cache_dir=tmp_path / "second")
        kernel = client.kernel(PROBLEM)
    assert isinstance(kernel, Kernel)
    assert "cannot be remembered" in caplog.text
    assert set(KnownKeys().of(address) or ()) == {old}
    assert isinstance(client.kernel(PROBLEM), Kernel)  # the service is away


def test_a_pinned_key_leads_to_its_successor(
    site: Site, turn_key: Callable[..., None], tmp_path: Path
) -> None:
    pinned = [site.key_pair.public_key]
    turn_key()

    with site.serving() as address:
        kernel = Client(address, public_keys=pinned, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert KnownKeys().of(address) is None


def test_a_compromised_key_leads_nowhere(
    site: Site, turn_key: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "first").kernel(PROBLEM)
    old = site.key_pair
    turn_key("--compromised")
    new = site.key_pair.key_id
    assert f"keys accept URL {new}" in capsys.readouterr().out

    with site.serving(port=_port_of(address)):
        with pytest.raises(SignatureInvalid, match=f"keys accept {address} {new}"):
            Client(address, cache_dir=tmp_path / "second").kernel(PROBLEM)
        assert run(["keys", "accept", address, new]) == 0
        assert isinstance(Client(address, cache_dir=tmp_path / "second").kernel(PROBLEM), Kernel)
    assert site.repository.revocations().key_ids == (old.key_id,)


def test_a_thief_of_a_revoked_key_is_not_believed_even_by_its_pin(
    site: Site,
    turn_key: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revocations, "ASK_EVERY_S", 0.0)
    stolen = site.key_pair
    thiefs_path = tmp_path / "thief" / "signing-key.pem"
    thiefs_path.parent.mkdir()
    thiefs_path.write_bytes(site.settings.signing_key_path.read_bytes())
    thiefs_path.chmod(0o600)
    thief = Site.at(site.settings.database_url, thiefs_path, site.repository)
    turn_key()
    new = site.key_pair.public_key

    with site.serving() as address:
        Client(address, public_keys=[new], cache_dir=tmp_path / "cache").kernel(PROBLEM)
        arguments = ["--reason", "stolen", "--db", site.settings.database_url]
        assert run(["revoke", stolen.key_id, *arguments]) == 0
        Client(address, public_keys=[new], cache_dir=tmp_path / "cache").kernel(PROBLEM)
    pins = [new, stolen.public_key]
    with thief.serving(port=_port_of(address)):
        client = Client(address, public_keys=pins, cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid, match=f"the key {stolen.key_id}, which was revoked"):
            client.kernel(PROBLEM)
    # Nor does the stolen key lead to one of the thief's own.
    rotate(thiefs_path, is_compromised=False)
    with thief.serving(port=_port_of(address)):
        client = Client(address, public_keys=pins, cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid, match="not pinned"):
            client.kernel(PROBLEM)


def test_successions_of_revoked_keys_are_not_shown(
    site: Site, turn_key: Callable[..., None]
) -> None:
    old = KeyPair.load_or_create(site.settings.signing_key_path).key_id
    turn_key()

    with site.serving() as address:
        before = httpx.get(f"{address}/v1/keys", trust_env=False).json()["successions"]
        run(["revoke", old, "--reason", "stolen", "--db", site.settings.database_url])
        after = httpx.get(f"{address}/v1/keys", trust_env=False).json()["successions"]

    assert len(before) == 1
    assert after == []


def test_a_stolen_key_is_not_lost_before_it_is_revoked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: object, **_named: object) -> bool:
        raise StoreFailed("the disk is full")

    before = site.key_pair.key_id
    arguments = ["--key", str(site.settings.signing_key_path), "--db", site.settings.database_url]
    with monkeypatch.context() as full:
        full.setattr(Repository, "revoke", fail)
        assert run(["keys", "rotate", "--compromised", *arguments]) == SOMETHING_IS_MISSING
    assert site.key_pair.key_id == before

    assert run(["keys", "rotate", "--compromised", *arguments]) == 0
    assert site.key_pair.key_id != before
    assert site.repository.revocations().key_ids == (before,)


def test_a_service_with_a_revoked_key_does_not_start(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--db", site.settings.database_url]
    run(["revoke", site.key_pair.key_id, "--reason", "stolen", *where])

    code = run(["serve", "--key", str(site.settings.signing_key_path), *where])

    assert code == WRONG_USAGE
    assert "keys rotate --compromised" in capsys.readouterr().err


def test_a_revoked_key_does_not_take_its_revocation_back(
    site: Site,
    turn_key: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(revocations, "ASK_EVERY_S", 0.0)
    stolen = site.key_pair
    turn_key()
    pins = [site.key_pair.public_key, stolen.public_key]
    arguments = ["--reason", "stolen", "--db", site.settings.database_url]
    assert run(["revoke", stolen.key_id, *arguments]) == 0
    nothing = Revocations(number=9, artifacts=(), key_ids=())
    forged = sign_revocations(nothing, stolen, issued_at=datetime.now(UTC)).model_dump_json()

    def forge(path: str, body: bytes) -> bytes:
        return forged.encode() if path == "/v1/revocations" else body

    with site.serving() as address:
        Client(address, public_keys=pins, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    with site.serving(forge, port=_port_of(address)):
        Client(address, public_keys=pins, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    (kept,) = (tmp_path / "cache" / "revocations").iterdir()
    assert json.loads(kept.read_bytes())["key_ids"] == [stolen.key_id]
    assert f"it is signed with the key {stolen.key_id}, which was revoked" in caplog.text
