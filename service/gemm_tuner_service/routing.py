"""What each route asks of its callers: one table, which the OpenAPI document shows.

A request that fits no row is not passed on: a route without a row cannot be reached.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemm_tuner.domain.access import Scope

# Asked so that a process that hangs is ended: no bound refuses it.
LIVENESS = "/healthz"

_SCHEME = "token"
_PARAMETER = re.compile(r"\\{[a-z0-9_]+\\}")

# What callers without a token may do.
SCOPES_OF_SOCKET = frozenset(Scope)
SCOPES_OF_LOOPBACK = frozenset({Scope.RESOLVE, Scope.METRICS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A route, and the scope that it needs; None is for everyone.

    A page for people takes a session in the place of a token, and tells errors as a page.
    """

    method: str
    path: str
    scope: Scope | None
    is_page: bool = False


# fmt: off
_TABLE: tuple[tuple[str, str, Scope | None], ...] = (
    ("GET",  "/docs",                               None),
    ("GET",  "/docs/oauth2-redirect",               None),
    ("GET",  "/redoc",                              None),
    ("GET",  "/openapi.json",                       None),
    ("GET",  LIVENESS,                              None),
    ("GET",  "/readyz",                             None),
    ("GET",  "/version",                            None),
    ("GET",  "/metrics",                            Scope.METRICS),
    ("GET",  "/v1/keys",                            None),
    ("GET",  "/v1/revocations",                     None),
    ("GET",  "/v1/abi/gemm_tuner.h",                None),
    ("GET",  "/v1/kernels",                         Scope.RESOLVE),
    ("POST", "/v1/resolve",                         Scope.RESOLVE),
    ("POST", "/v1/resolve:batch",                   Scope.RESOLVE),
    ("GET",  "/v1/artifacts/sha256/{sha256}",       Scope.RESOLVE),
    ("GET",  "/v1/artifacts/sha256/{sha256}/source", Scope.RESOLVE),
    ("GET",  "/v1/records",                         Scope.RESOLVE),
    ("POST", "/v1/records",                         Scope.RECORDS_WRITE),
    ("PUT",  "/v1/artifacts/sha256/{sha256}",       Scope.RECORDS_WRITE),
    ("GET",  "/v1/contributions",                   Scope.RECORDS_WRITE),
    ("POST", "/v1/jobs",                            Scope.TUNE),
    ("GET",  "/v1/jobs",                            Scope.TUNE),
    ("GET",  "/v1/jobs/{job_id}",                   Scope.TUNE),
    ("POST", "/v1/jobs/{job_id}:cancel",            Scope.TUNE),
    ("GET",  "/v1/jobs/{job_id}/events",            Scope.TUNE),
    # It shows what all callers ask for.
    ("GET",  "/v1/misses",                          Scope.ADMIN),
    ("PUT",  "/v1/revocations/{subject}",           Scope.ADMIN),
    ("DELETE", "/v1/revocations/{subject}",         Scope.ADMIN),
)

STYLE = "/style.css"
SIGN_IN = "/sign-in"
SIGN_OUT = "/sign-out"

_PAGES: tuple[tuple[str, str, Scope | None], ...] = (
    ("GET",  "/",                                   Scope.RESOLVE),
    ("GET",  "/cpus",                               Scope.RESOLVE),
    ("GET",  "/cpus/{cpu_key}",                     Scope.RESOLVE),
    ("GET",  "/problems",                           Scope.RESOLVE),
    ("GET",  "/problems/{key}",                     Scope.RESOLVE),
    ("GET",  "/kernels/{sha256}",                   Scope.RESOLVE),
    ("GET",  "/jobs",                               Scope.TUNE),
    ("GET",  "/jobs/{job_id}",                      Scope.TUNE),
    ("GET",  "/wanted",                             Scope.ADMIN),
    ("GET",  STYLE,                                 None),
    ("GET",  SIGN_IN,                               None),
    ("POST", SIGN_IN,                               None),
    ("POST", SIGN_OUT,                              None),
)
# fmt: on

RULES = tuple(
    Rule(method=method, path=path, scope=scope, is_page=table is _PAGES)
    for table in (_TABLE, _PAGES)
    for method, path, scope in table
)

_EXACT = {(rule.method, rule.path): rule for rule in RULES if "{" not in rule.path}
_WITH_PARAMETERS = tuple(
    (rule, re.compile(_PARAMETER.sub("[^/]+", re.escape(rule.path))))
    for rule in RULES
    if "{" in rule.path
)


def rule_of(method: str, path: str) -> Rule | None:
    """Return the row that a request fits, None if there is none."""
    rule = _EXACT.get((method, path))
    if rule is not None:
        return rule
    return next(
        (
            rule
            for rule, pattern in _WITH_PARAMETERS
            if rule.method == method and pattern.fullmatch(path)
        ),
        None,
    )


def is_page(request: Mapping[str, Any]) -> bool:
    """Return whether a request, an ASGI scope, is answered with a page.

    So is what a browser asks for at an address that there is not, such as a mistyped one.
    """
    rule = rule_of(request["method"], request["path"])
    if rule is not None:
        return rule.is_page
    accepted = b",".join(value for name, value in request["headers"] if name == b"accept")
    return not request["path"].startswith("/v1/") and b"text/html" in accepted


def methods_of(path: str) -> tuple[str, ...]:
    """Return the methods that a path has."""
    methods = {rule.method for rule in RULES if rule_of(rule.method, path)}
    return tuple(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def show_in_openapi(document: dict[str, Any]) -> dict[str, Any]:
    """Add to an OpenAPI document which scope each operation needs, and return it."""
    document.setdefault("components", {})["securitySchemes"] = {
        _SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of `gemm-tuner tokens create`. The names are the scopes that "
            "it needs. On the service's Unix socket no token is needed, and on a loopback address "
            "none where `{}` is an alternative.",
        }
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            rule = rule_of(method.upper(), path)
            assert rule is not None, f"{method} {path} has no row in the table of routes"
            operation["security"] = _security_of(rule)
    return document


def _security_of(rule: Rule) -> list[dict[str, list[str]]]:
    if rule.scope is None:
        return []
    needed = [{_SCHEME: [rule.scope.value]}]
    return [*needed, {}] if rule.scope in SCOPES_OF_LOOPBACK else needed
