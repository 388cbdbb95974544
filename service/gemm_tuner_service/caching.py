"""Entity tags: an answer that the caller has already is not sent again."""

from http import HTTPStatus

from fastapi import Response

from gemm_tuner_service.answering.answers import Answer


def tagged(answer: Answer, if_none_match: str | None) -> Response:
    """Return `answer` with its entity tag, or 304 when the caller named that tag."""
    headers = {"ETag": answer.tag, "Cache-Control": "no-cache"}
    if matches(if_none_match, answer.tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(answer.content, media_type="application/json", headers=headers)


def quoted(digest: str) -> str:
    """Return the entity tag made of `digest`."""
    return f'"{digest}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Return whether the header If-None-Match, if there was one, names `tag`."""
    named = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
    return tag in named or "*" in named
