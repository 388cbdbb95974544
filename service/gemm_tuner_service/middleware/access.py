"""Who may pass: middleware that stands before every route."""

import logging
from http import HTTPStatus

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gemm_tuner.errors import GemmTunerError
from gemm_tuner_service.clients.callers import Caller, NotAuthenticated, SentInClearText
from gemm_tuner_service.clients.client_limits import TooManyRequests
from gemm_tuner_service.dependencies import RunningService
from gemm_tuner_service.metrics import TOKENS_REFUSED
from gemm_tuner_service.middleware.lasting import WORK
from gemm_tuner_service.middleware.observing import CALLER, FROM
from gemm_tuner_service.problems import busy_response, error_response, problem_response
from gemm_tuner_service.routing import LIVENESS, Rule, is_page, methods_of, rule_of

_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="gemm-tuner"'}
_LOGGER = logging.getLogger(__name__)


class AccessControl:
    """Middleware that passes on what fits a row of the table of routes, from who may ask it.

    It puts the caller into the state of the request: for a route that is for everyone, the address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why not."""
        if scope["type"] == "http":
            refusal = await _refusal_of(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ClientWork:
    """Middleware that counts what each client has in progress. It follows `AccessControl`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, unless its client asks too much."""
        caller: Caller | None = scope.get("state", {}).get(CALLER)
        if caller is None:  # whether the process lives, or the start and the end of the service
            await self._app(scope, receive, send)
            return
        service: RunningService = scope["app"].state.service
        try:
            work = service.limits.begin(caller.key)
        except TooManyRequests as error:
            await busy_response(error)(scope, receive, send)
            return
        scope["state"][WORK] = work
        try:
            await self._app(scope, receive, send)
        finally:
            work.end()


async def _refusal_of(scope: Scope) -> Response | None:
    """Return the answer to a request that may not pass, and else note who sent it."""
    rule = rule_of(scope["method"], scope["path"])
    service: RunningService = scope["app"].state.service
    peer = service.callers.peer_of(scope)
    state = scope.setdefault("state", {})
    state[FROM] = peer.name
    if rule is not None and rule.scope is None:
        if rule.path != LIVENESS:
            state[CALLER] = Caller(key=peer.key, name=peer.name, scopes=frozenset())
        return None
    try:
        caller = await service.callers.identify(scope, peer, is_page=is_page(scope))
    except NotAuthenticated:
        TOKENS_REFUSED.inc()
        return problem_response(
            HTTPStatus.UNAUTHORIZED,
            "this needs a token that counts, in the header Authorization: Bearer; "
            'one is made by "gemm-tuner tokens create" where the service runs. Callers on that '
            "machine need none for what anyone may read, if they name it localhost.",
            _CHALLENGE,
        )
    except SentInClearText:
        _LOGGER.warning("%s sent a token in clear text; it should be revoked.", peer.name)
        return problem_response(
            HTTPStatus.FORBIDDEN,
            "a token was sent in clear text: revoke it, and ask by https; a proxy must be named "
            "by --behind-proxy and send X-Forwarded-For and X-Forwarded-Proto.",
        )
    except TooManyRequests as error:
        return busy_response(error)
    except GemmTunerError as error:
        return error_response(error)
    state[CALLER] = caller
    return _without_right(scope, rule, caller)


def _without_right(scope: Scope, rule: Rule | None, caller: Caller) -> Response | None:
    if rule is not None:
        if rule.scope in caller.scopes:
            return None
        return problem_response(
            HTTPStatus.FORBIDDEN, f"this needs a token with the scope {rule.scope}."
        )
    methods = methods_of(scope["path"])
    if not methods:
        return problem_response(
            HTTPStatus.NOT_FOUND, "there is nothing at this path; see /openapi.json."
        )
    return problem_response(
        HTTPStatus.METHOD_NOT_ALLOWED,
        f"this path has only {', '.join(methods)}.",
        {"Allow": ", ".join(methods)},
    )
