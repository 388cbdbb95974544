"""Answers of someone who wants a client to fail, or to say what the client does not."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from relay import Instead
from served import PROBLEM, Site

from gemm_tuner import Client
from gemm_tuner.errors import ServiceFailed, SignatureInvalid

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/keys", lambda client: client.kernel(PROBLEM)),
        ("/v1/resolve", lambda client: client.kernel(PROBLEM)),
        ("/v1/resolve:batch", lambda client: client.kernels([PROBLEM])),
        ("/v1/resolve:batch", lambda client: client.layer(32, 16, m=[8])),
    ],
)
def test_json_that_is_nested_too_deep_is_no_answer(
    path: str, ask: Callable[[Client], object], site: Site, tmp_path: Path
) -> None:
    with site.serving(lambda asked, body: DEEP if asked == path else body) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        gc.disable()  # what it would call at the greatest depth fails there
        try:
            with pytest.raises(SignatureInvalid):
                ask(client)
        finally:
            gc.enable()


def test_json_that_is_nested_too_deep_is_no_reason(site: Site, tmp_path: Path) -> None:
    instead = Instead("/v1/resolve", 404, body=DEEP)
    with site.serving(around=instead) as address, pytest.raises(ServiceFailed, match=r"404: \[\["):
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)


@pytest.mark.parametrize("is_document", [True, False])
def test_what_a_service_says_is_quoted_harmless_and_short(
    site: Site, tmp_path: Path, *, is_document: bool
) -> None:
    said = "\x1b[2J\r\n\u202egone" + "z" * 100_000
    body = json.dumps({"title": said, "detail": said}) if is_document else said
    instead = Instead("/v1/resolve", 404, body=body.encode())
    with site.serving(around=instead) as address, pytest.raises(ServiceFailed) as told:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert r"404: \x1b[2J\x0d\n\u202egonezzz" in str(told.value)
    assert len(str(told.value)) < 1200
