"""A client that shows a token: where it is sent, and where not."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from served import PROBLEM, Site
from sqlalchemy import Engine

from gemm_tuner import Client
from gemm_tuner.client.transport import Address
from gemm_tuner.domain.access import Scope, TokenSecret
from gemm_tuner.errors import InvalidSetting, ServiceFailed
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens

TOKEN = TokenSecret.generate().text


def _token_for(site: Site, scope: Scope) -> str:
    engine: Engine = open_database(site.settings.database_url)
    secret = Tokens(engine).create("ci", [scope], actor="test", now=datetime.now(UTC))[1]
    engine.dispose()
    return secret.text


def test_a_kernel_is_fetched_with_a_token(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        token = _token_for(site, Scope.RESOLVE)
        client = Client(address, cache_dir=tmp_path / "cache", token=token)

        assert isinstance(client.kernel(PROBLEM), Kernel)
        assert token not in repr(vars(client))


@pytest.mark.parametrize(("scope", "status"), [(Scope.TUNE, "403"), (None, "401")])
def test_a_token_that_does_not_permit_it_is_told_without_it(
    site: Site, tmp_path: Path, scope: Scope | None, status: str
) -> None:
    token = TOKEN if scope is None else _token_for(site, scope)
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache", token=token)
        with pytest.raises(ServiceFailed, match=f"answered with {status}") as failure:
            client.kernel(PROBLEM)

    assert token not in str(failure.value)


@pytest.mark.parametrize("url", ["http://gemm.example", "http://192.0.2.1:8000"])
def test_a_token_is_not_sent_in_clear_text(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidSetting, match="clear text") as refusal:
        Client(url, cache_dir=tmp_path, token=TOKEN)
    assert TOKEN not in str(refusal.value)

    monkeypatch.setenv("GEMM_TUNER_TOKEN", TOKEN)
    with pytest.raises(InvalidSetting, match="clear text"):
        Client(url, cache_dir=tmp_path)


def test_the_token_of_the_environment_goes_to_other_machines_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GEMM_TUNER_TOKEN", TOKEN)

    def token_for(url: str) -> TokenSecret | None:
        return Address.parse(url).with_token(None).token

    assert token_for("https://gemm.example") == TokenSecret.parse(TOKEN)
    assert token_for("http://127.0.0.1:8000") is None
    assert token_for("unix:/run/gemm-tuner") is None
    assert TOKEN not in repr(Address.parse("https://gemm.example").with_token(None))


def test_what_is_no_token_is_told_without_it(tmp_path: Path) -> None:
    wrong = TOKEN[:-1]
    with pytest.raises(InvalidSetting) as refusal:
        Client("https://gemm.example", cache_dir=tmp_path, token=wrong)

    assert wrong not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://a:1/\udcff",
        "http://ho\nst",
        "http://a b",
        "unix:/tmp/a\n",
        "http://a/\x1b",
        "http://a:1?x=1",
        "http://a:1/b#c",
    ],
)
def test_addresses_that_no_service_has_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="is not understood") as told:
        Address.parse(url)

    assert str(told.value).isprintable()
