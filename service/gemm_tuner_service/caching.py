"""Entity tags: an answer that the caller has already is not sent again."""

from hashlib import sha256
from http import HTTPStatus

from fastapi import Response
from pydantic import BaseModel


def tagged(answer: BaseModel, if_none_match: str | None) -> Response:
    """Return `answer` with its entity tag, or 304 when the caller named that tag."""
    content = answer.model_dump_json().encode()
    tag = quoted(sha256(content).hexdigest())
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if matches(if_none_match, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(content, media_type="application/json", headers=headers)


def quoted(digest: str) -> str:
    """Return the entity tag made of `digest`."""
    return f'"{digest}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Return whether the header If-None-Match, if there was one, names `tag`."""
    named = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
    return tag in named or "*" in named
