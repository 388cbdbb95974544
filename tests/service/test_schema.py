"""Requests made from the OpenAPI document, right and wrong: no 500, and nothing undocumented.

SCHEMA_CASES=210 pytest -m proof tests/service/test_schema.py  # 10,080 answers
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from databases import Databases, SqliteDatabases
from gemm_tuner_service.clients.peers import Proxies
from gemm_tuner_service.routes import resolve
from postgres import find_programs
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import served, settings_of, tune

from gemm_tuner.domain.access import Scope
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens

# For each of 24 operations, and asked on each of 2 databases: 2,400. The same ones come first.
CASES = int(os.environ.get("SCHEMA_CASES", "50"))
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


# With a parameter, Schemathesis names each test for its operation.
@pytest.fixture(scope="module", params=["all databases"])
def sites(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Yield the addresses of services on all databases, each with the headers of a caller.

    The caller may do everything. No worker runs, so nobody waits there.
    """
    folder = tmp_path_factory.mktemp("schema")
    kinds: list[Databases] = [SqliteDatabases(folder)]
    if find_programs() is not None:
        kinds.append(request.getfixturevalue("postgres_databases"))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(resolve, "LONGEST_WAIT_S", 0)
        yield [stack.enter_context(_site(databases, folder)) for databases in kinds]


@contextmanager
def _site(databases: Databases, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    with databases.filled(tune) as url:
        engine = open_database(url)
        _token, secret = Tokens(engine).create(
            "all", tuple(Scope), actor="test", now=datetime.now(UTC)
        )
        engine.dispose()
        settings = replace(settings_of(url, folder), proxies=Proxies.parse(["127.0.0.1"]))
        with served(settings) as client:
            headers = {"Authorization": f"Bearer {secret.text}", **FROM_ELSEWHERE}
            yield str(client.base_url), headers


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Yield what keeps connections, and asks the system for no proxies or passwords."""
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.mark.proof
@schema.parametrize()
@hypothesis.settings(
    max_examples=CASES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_every_request_has_an_answer_that_is_documented(
    case: schemathesis.Case[Any],
    sites: list[tuple[str, dict[str, str]]],
    session: requests.Session,
) -> None:
    for address, headers in sites:
        answer = case.call(base_url=address, headers=headers, session=session)

        case.validate_response(answer, checks=CHECKS)
