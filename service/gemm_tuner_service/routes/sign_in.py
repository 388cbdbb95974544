"""`/sign-in` and `/sign-out`: from a token to the session of a browser, and its end."""

from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from gemm_tuner_service.clients.callers import NotAuthenticated, SentInClearText
from gemm_tuner_service.clients.sessions import cookie_of, cookies_away
from gemm_tuner_service.dashboard.render import render
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.metrics import TOKENS_REFUSED
from gemm_tuner_service.routing import SIGN_IN, SIGN_OUT, rule_of

_MAX_FIELDS = 4
_MAX_WANTED = 2000

router = APIRouter(include_in_schema=False)


@router.get(SIGN_IN)
def show_form(request: Request) -> Response:
    """Show the form that takes a token."""
    return HTMLResponse(render(request.scope, "sign_in.html.j2", detail="", wanted=""))


@router.post(SIGN_IN)
async def sign_in(request: Request, service: Service) -> Response:
    """Begin a session with the token of the form, and go on to the page that was wanted."""
    _check_origin(request)
    peer = service.callers.peer_of(request.scope)
    fields = _fields_of(await request.body())
    try:
        token = await service.callers.token_of(fields.get("token", "").strip(), peer)
    except NotAuthenticated:
        TOKENS_REFUSED.inc()
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED,
            'this is no token that counts; give what "gemm-tuner tokens create" printed.',
        ) from None
    except SentInClearText:
        raise HTTPException(
            HTTPStatus.FORBIDDEN,
            "the token was sent in clear text: revoke it, and sign in by https.",
        ) from None
    now = datetime.now(UTC)
    session, ends_at = service.sessions.begin(token, now)
    is_secure = not peer.is_loopback
    return _see_other(
        _local(fields.get("wanted", "")),
        cookie_of(session, ends_at=ends_at, now=now, is_secure=is_secure),
    )


@router.post(SIGN_OUT)
async def sign_out(request: Request) -> Response:
    """End the session of this browser."""
    _check_origin(request)
    return _see_other(SIGN_IN, *cookies_away())


def _see_other(place: str, *cookies: str) -> Response:
    answer = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": place})
    for cookie in cookies:
        answer.headers.append("Set-Cookie", cookie)
    return answer


def _check_origin(request: Request) -> None:
    """Check that the form was sent from a page of this service, where the browser says so.

    Raises:
        HTTPException: it was sent from elsewhere.
    """
    site = request.headers.get("sec-fetch-site", "same-origin")
    origin = request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if site not in {"same-origin", "none"} or not is_own:
        raise HTTPException(
            HTTPStatus.FORBIDDEN, f"the form was sent from another site; open {SIGN_IN} itself."
        )


def _fields_of(body: bytes) -> dict[str, str]:
    """Return the fields of a form."""
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"this is no form of ours; open {SIGN_IN}."
        ) from None
    return {name: values[-1] for name, values in found.items()}


def _local(wanted: str) -> str:
    """Return where to go after signing in: a page of this service, the overview if it is none."""
    is_plain = len(wanted) <= _MAX_WANTED and wanted.isascii() and wanted.isprintable()
    path, _mark, query = wanted.partition("?")
    rule = rule_of("GET", path) if is_plain and "\\" not in wanted else None
    if rule is None or not rule.is_page or rule.scope is None:
        return "/"
    return f"{path}?{query}" if query else path
