"""Requests made from the OpenAPI document, right and wrong: no 500, and nothing undocumented."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from databases import Databases
from gemm_tuner_service.peers import Proxies
from gemm_tuner_service.routes import resolve
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import served, settings_of, tune

from gemm_tuner.domain.access import Scope
from gemm_tuner.store.database import open_database
from gemm_tuner.store.tokens import Tokens

CASES = 210  # for each of 24 operations on each of 2 databases: 10,080
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FROM_ELSEWHERE = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https"}


@schemathesis.serializer("application/x-ndjson")
def as_lines(_context: object, value: object) -> bytes:
    """Return what was generated as the body of a request."""
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


schema = schemathesis.openapi.from_path(Path(__file__).parents[2] / "docs" / "openapi.json")


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, databases: Databases
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of a service, and the headers of a caller who may do everything.

    No worker runs, so nobody waits there.
    """
    with pytest.MonkeyPatch.context() as patch, databases.filled(tune) as url:
        patch.setattr(resolve, "LONGEST_WAIT_S", 0)
        settings = settings_of(url, tmp_path_factory.mktemp("schema"))
        engine = open_database(url)
        _token, secret = Tokens(engine).create(
            "all", tuple(Scope), actor="test", now=datetime.now(UTC)
        )
        engine.dispose()
        with served(replace(settings, proxies=Proxies.parse(["127.0.0.1"]))) as client:
            headers = {"Authorization": f"Bearer {secret.text}", **FROM_ELSEWHERE}
            yield str(client.base_url), headers


@pytest.mark.proof
@schema.parametrize()
@hypothesis.settings(
    max_examples=CASES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_request_has_an_answer_that_is_documented(
    case: schemathesis.Case[Any], site: tuple[str, dict[str, str]]
) -> None:
    address, headers = site

    answer = case.call(base_url=address, headers=headers)

    case.validate_response(answer, checks=CHECKS)
