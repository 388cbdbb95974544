"""Errors as RFC 9457 problem documents: one table from errors to answers."""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel
from starlette.exceptions import HTTPException

from gemm_tuner.domain.canonical import canonical_json, json_pointer
from gemm_tuner.errors import (
    ContributionsFull,
    DigestMismatch,
    GemmTunerError,
    InvalidEpilogue,
    InvalidInput,
    InvalidProblem,
    InvalidSetting,
    NoKernelFamily,
    StoreFailed,
)
from gemm_tuner.store.jobs.jobs import JobsFull
from gemm_tuner_service.bounds import MAX_FAULTS
from gemm_tuner_service.clients.client_limits import TooManyRequests
from gemm_tuner_service.request_ids import REQUEST_ID, REQUEST_ID_HEADER

MEDIA_TYPE = "application/problem+json"

_MAX_TEXT = 500
_JOBS_FULL_S = 60  # until a job may be over
_LOGGER = logging.getLogger(__name__)

# fmt: off
_STATUS: tuple[tuple[type[GemmTunerError], HTTPStatus, str], ...] = (
    # the first row whose class fits
    (InvalidProblem,  HTTPStatus.UNPROCESSABLE_ENTITY,  "invalid-problem"),
    (InvalidEpilogue, HTTPStatus.UNPROCESSABLE_ENTITY,  "invalid-epilogue"),
    (InvalidSetting,  HTTPStatus.UNPROCESSABLE_ENTITY,  "invalid-setting"),
    (InvalidInput,    HTTPStatus.UNPROCESSABLE_ENTITY,  "invalid-input"),
    (DigestMismatch,  HTTPStatus.UNPROCESSABLE_ENTITY,  "digest-mismatch"),
    (ContributionsFull, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "contributions-full"),
    (NoKernelFamily,  HTTPStatus.UNPROCESSABLE_ENTITY,  "no-kernel-family"),
    (JobsFull,        HTTPStatus.TOO_MANY_REQUESTS,     "jobs-full"),
    (StoreFailed,     HTTPStatus.SERVICE_UNAVAILABLE,   "store-failed"),
    (GemmTunerError,  HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error"),
)
# fmt: on


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


# Callers choose the names that are repeated to them.
_ShortText = Annotated[str, AfterValidator(_cut)]


class Fault(BaseModel):
    """One fault of a request: a JSON pointer to the place, and what is wrong there.

    Where each line of the request is a document of its own, `line` counts them from 1.
    """

    pointer: _ShortText
    detail: _ShortText
    line: int | None = None


class InvalidLines(Exception):
    """Some lines of a request are not what they should be; `faults` are the first of `count`."""

    def __init__(self, faults: Sequence[Fault], *, count: int) -> None:
        super().__init__(f"{count} lines")
        self.faults = tuple(faults)
        self.count = count


class ProblemDocument(BaseModel):
    """An error as RFC 9457 describes it. `type` is stable; `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[Fault] = []

    @property
    def text(self) -> str:
        """Return its JSON, in ASCII: what a caller sent may hold text that has no UTF-8 form."""
        return canonical_json(self.model_dump(exclude_defaults=True))


_HTTP_NAMES = {
    HTTPStatus.BAD_REQUEST: "bad-request",
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "not-found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method-not-allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "content-too-large",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "range-not-satisfiable",
    HTTPStatus.TOO_MANY_REQUESTS: "too-many-requests",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded",
}

# Why FastAPI could not read a body, which it does not tell; the first row whose class fits.
_UNREADABLE = (
    (RecursionError, "it is nested too deeply; send fewer levels"),
    (UnicodeDecodeError, "it is no text in UTF-8; send it as that"),
    (ValueError, "a number has too many digits; send a shorter one"),
)

# What the OpenAPI document says of errors, for every route.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "What was asked cannot be answered",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    },
}


def describe(error: GemmTunerError) -> ProblemDocument:
    """Return the problem document of an error."""
    status, name = next((status, name) for kind, status, name in _STATUS if isinstance(error, kind))
    return _document(status, name, str(error))


def problem_response(
    status: HTTPStatus, detail: str, headers: dict[str, str] | None = None
) -> Response:
    """Return the problem document of an error of HTTP."""
    return _response(_document(status, _HTTP_NAMES.get(status, "http-error"), detail), headers)


def error_response(error: GemmTunerError) -> Response:
    """Return the problem document of an error of ours."""
    document = describe(error)
    if document.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _LOGGER.error("answered %d: %s", document.status, error)
    is_busy = document.status == HTTPStatus.TOO_MANY_REQUESTS
    return _response(document, {"Retry-After": str(_JOBS_FULL_S)} if is_busy else None)


def busy_response(error: TooManyRequests) -> Response:
    """Return the problem document for a client that asks too much."""
    return problem_response(error.status, error.detail, {"Retry-After": str(error.retry_after_s)})


def invalid_request(*faults: Fault) -> Response:
    """Return the problem document for a request that is not what a route accepts."""
    place = faults[0].pointer or "request"
    detail = f"{place}: {faults[0].detail}; see /openapi.json for what is accepted."
    return _response(_document(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, *faults))


def install_handlers(app: FastAPI) -> None:
    """Make every error that leaves `app` a problem document."""
    app.add_exception_handler(GemmTunerError, _answer_own)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(InvalidLines, _answer_lines)
    app.add_exception_handler(TooManyRequests, _answer_busy)
    app.add_exception_handler(Exception, _answer_unexpected)


def _document(status: HTTPStatus, name: str, detail: str, *faults: Fault) -> ProblemDocument:
    return ProblemDocument(
        type=f"urn:gemm-tuner:problem:{name}",
        title=name.replace("-", " ").capitalize(),
        status=status,
        detail=detail,
        errors=list(faults),
    )


def _response(document: ProblemDocument, headers: dict[str, str] | None = None) -> Response:
    return Response(
        document.text,
        status_code=document.status,
        headers=headers,
        media_type=MEDIA_TYPE,
    )


def _answer_own(_request: Request, error: Exception) -> Response:
    assert isinstance(error, GemmTunerError)
    return error_response(error)


def _answer_validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        Fault(pointer=_pointer(fault["type"], fault["loc"]), detail=str(fault["msg"]))
        for fault in error.errors()[:MAX_FAULTS]
    ]
    return invalid_request(*faults)


def _answer_lines(_request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidLines)
    first = error.faults[0]
    detail = (
        f"line {first.line}: {first.detail} {error.count} lines are at fault, and nothing was kept."
    )
    return _response(
        _document(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-records", detail, *error.faults)
    )


def _answer_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = next((told for kind, told in _UNREADABLE if isinstance(error.__cause__, kind)), None)
    detail = f"the body cannot be read as JSON: {told}." if told else error.detail
    return problem_response(HTTPStatus(error.status_code), detail, dict(error.headers or {}))


def _answer_busy(_request: Request, error: Exception) -> Response:
    assert isinstance(error, TooManyRequests)
    return busy_response(error)


def _answer_unexpected(request: Request, error: Exception) -> Response:
    _LOGGER.error("%s %a failed", request.method, request.scope["path"], exc_info=error)
    detail = "the service met an error of its own; its log has the cause: please report it."
    document = _document(HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)
    # This answer is made outside all middleware.
    return _response(document, {REQUEST_ID_HEADER: REQUEST_ID.get()})


def _pointer(kind: str, location: Sequence[str | int]) -> str:
    if kind == "json_invalid":
        return ""  # its location is a place in the text, and there is no document to point into
    # the first part says where the value was: query, path or body
    return json_pointer(location[1:])
