"""Whose answers a client believes: keys remembered at first sight, and a socket of its user."""

import json
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gemm_tuner_service.server.tls import TlsFiles
from served import PROBLEM, Site

from gemm_tuner import Client
from gemm_tuner.cli import serve
from gemm_tuner.cli.main import ANSWER_IS_NO, SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.client import connection
from gemm_tuner.client.keys import KnownKeys
from gemm_tuner.errors import InvalidSetting, SignatureInvalid, StoreFailed
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.local import default_socket_path


@pytest.fixture
def thief(site: Site, tmp_path: Path) -> Site:
    """Return a service with the same records, and a key of its own."""
    return Site.at(site.settings.database_url, tmp_path / "thief.pem", site.repository)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_another_key_at_a_known_address_is_refused_until_it_is_accepted(
    site: Site, thief: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "first").kernel(PROBLEM)

    with thief.serving(port=_port_of(address)):
        with pytest.raises(SignatureInvalid) as refusal:
            Client(address, cache_dir=tmp_path / "second").kernel(PROBLEM)
        command = str(refusal.value).partition("run: gemm-tuner ")[2].split()
        assert site.key_pair.key_id in str(refusal.value)
        assert command == ["keys", "accept", address, thief.key_pair.key_id]
        assert not list((tmp_path / "second" / "artifacts").iterdir())

        assert run(command) == 0
        assert isinstance(Client(address, cache_dir=tmp_path / "second").kernel(PROBLEM), Kernel)

    assert f"instead of {site.key_pair.key_id}" in capsys.readouterr().out


def test_only_the_key_that_was_named_is_accepted(
    site: Site, thief: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        code = run(["keys", "accept", address, thief.key_pair.key_id])

    assert code == ANSWER_IS_NO
    assert f"shows the key {site.key_pair.key_id}" in capsys.readouterr().err
    assert run(["keys", "forget", address]) == ANSWER_IS_NO


def test_keys_are_listed_and_forgotten(
    site: Site, thief: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    run(["keys", "list"])
    assert capsys.readouterr().out == f"{address} {site.key_pair.key_id}\n"

    assert run(["keys", "forget", address]) == 0
    with thief.serving(port=_port_of(address)):
        assert isinstance(Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM), Kernel)


def test_a_list_without_keys_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "list"]) == 0
    assert "No key of a service is trusted yet" in capsys.readouterr().err


def test_the_file_of_known_keys_is_private_and_must_stay_so(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "data" / "gemm-tuner" / "known-keys.json"
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        assert file.stat().st_mode & 0o777 == 0o600

        file.chmod(0o666)
        with pytest.raises(InvalidSetting, match="chmod 600"):
            Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)


@pytest.mark.parametrize("content", ["[]", '{"http://x": ["AAAA"]}', "{", '{"http://x": []}'])
def test_a_damaged_file_of_known_keys_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data" / "gemm-tuner" / "known-keys.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    file.chmod(0o600)

    assert run(["keys", "list"]) == WRONG_USAGE
    assert "known-keys.json" in capsys.readouterr().err


def test_a_service_that_shows_very_many_keys_has_none_remembered(
    site: Site, tmp_path: Path
) -> None:
    keys = [{"public_key": b64encode(bytes([one]) * 32).decode()} for one in range(65)]
    shown = json.dumps({"keys": keys}).encode()

    with site.serving(lambda path, body: shown if path == "/v1/keys" else body) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid, match="not understood"):
            client.kernel(PROBLEM)

    assert not KnownKeys().all()


def test_no_more_keys_are_remembered_than_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = KnownKeys()
    known.remember("http://first", {"a": bytes(32)})
    monkeypatch.setattr("gemm_tuner.client.keys._MAX_FILE_BYTES", known.path.stat().st_size)

    with pytest.raises(StoreFailed, match=r"longer than .* bytes.*keys forget"):
        known.remember("http://second", {"b": bytes(32)})

    assert set(known.all()) == {"http://first"}


@contextmanager
def _served_by_default(site: Site, *options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "gemm_tuner", "serve", "--db", site.settings.database_url]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            yield child.stderr.readline()
        finally:
            child.terminate()


def test_on_one_machine_service_and_client_meet_at_a_socket_of_their_user(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _served_by_default(site) as said:
        path = default_socket_path()
        client = Client(cache_dir=tmp_path / "cache", timeout_s=30)
        kernel = client.kernel(PROBLEM)
        second = run(["serve", "--db", site.settings.database_url])

        assert f"Serving at unix:{path};" in said
        assert path.stat().st_mode & 0o777 == 0o600
        assert isinstance(kernel, Kernel)
        assert second == SOMETHING_IS_MISSING
        assert f"a service listens at {path} already" in capsys.readouterr().err

    assert not path.exists()
    assert isinstance(Client(cache_dir=tmp_path / "cache").kernel(PROBLEM), Kernel)


def test_a_socket_of_another_user_is_not_asked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sock"
    with _served_by_default(site, "--socket", str(path)):
        monkeypatch.setattr(connection, "peer_uid", lambda _socket: os.getuid() + 1)
        kernel = Client(f"unix:{path}", cache_dir=tmp_path / "cache", timeout_s=30).kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert re.search(r"the user \d+ listens there, not you", kernel.reason)


def test_a_socket_left_by_a_killed_service_is_taken_over(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-m", "gemm_tuner", "serve", "--socket", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        child.stderr.readline()
        child.kill()
    assert path.exists()

    with _served_by_default(site, "--socket", str(path)) as said:
        assert f"Serving at unix:{path};" in said


@pytest.fixture
def nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `serve` end where it would begin to answer."""
    monkeypatch.setattr(serve, "run_service", lambda *_arguments, **_named: None)


@pytest.mark.usefixtures("nothing_serves")
@pytest.mark.parametrize("options", [[], ["--behind-proxy", "unix"]])
def test_an_address_that_others_can_reach_needs_tls_or_a_proxy(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    everywhere = ["--host", "0.0.0.0", "--port", "0"]  # noqa: S104
    assert run(["serve", *everywhere, *options]) == WRONG_USAGE

    said = capsys.readouterr().err
    assert "--tls-certificate" in said
    assert "--behind-proxy" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-key", "k.pem"], "--tls-key is nothing"),
        (["--tls-certificate", "missing.pem"], "cannot be used"),
        (["--behind-proxy", "nginx"], "proxy is not understood"),
    ],
)
def test_a_way_that_protects_nothing_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--port", "0", *options]) == WRONG_USAGE
    assert message in capsys.readouterr().err


def test_a_database_that_others_can_write_is_not_served(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "gemm-tuner.sqlite3").chmod(0o666)

    assert run(["serve", "--db", site.settings.database_url]) == WRONG_USAGE
    assert "can be changed by other users" in capsys.readouterr().err


def test_a_socket_and_a_port_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--socket", "x", "--port", "0"]) == WRONG_USAGE
    assert "choose one" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_serves")
def test_a_database_beside_which_others_can_make_files_is_not_served(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site").chmod(0o1777)

    assert run(["serve", "--db", site.settings.database_url]) == WRONG_USAGE
    assert "a journal" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_serves")
def test_a_certificate_with_the_key_that_others_can_write_is_not_served(
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TlsFiles, "context", lambda _files: None)
    file = tmp_path / "chain-and-key.pem"
    file.touch()
    file.chmod(0o666)
    options = ["--port", "0", "--tls-certificate", str(file), "--db", site.settings.database_url]

    assert run(["serve", *options]) == WRONG_USAGE
    assert f"{file} can be changed by other users" in capsys.readouterr().err
