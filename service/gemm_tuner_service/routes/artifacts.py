"""`/v1/artifacts`: kernel binaries and their sources, by content and so for ever the same."""

from hashlib import sha256 as digest_of
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Path, Response

from gemm_tuner_service.caching import matches, quoted
from gemm_tuner_service.dependencies import Service

router = APIRouter(tags=["artifacts"])

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the binary's digest, in hex")]
IfNoneMatch = Annotated[str | None, Header()]


class Binary(Response):
    """A shared library."""

    media_type = "application/octet-stream"


class SourceText(Response):
    """A C++ source."""

    media_type = "text/x-c++src"


@router.head("/v1/artifacts/sha256/{sha256}", include_in_schema=False)
@router.get("/v1/artifacts/sha256/{sha256}", response_class=Binary)
def read_artifact(sha256: Sha256, service: Service, if_none_match: IfNoneMatch = None) -> Response:
    """Return a kernel binary."""
    binary = service.repository.binary(sha256)
    if binary is None:
        raise _not_here(sha256)
    return _immutable(Binary, binary, sha256, if_none_match)


@router.head("/v1/artifacts/sha256/{sha256}/source", include_in_schema=False)
@router.get("/v1/artifacts/sha256/{sha256}/source", response_class=SourceText)
def read_source(sha256: Sha256, service: Service, if_none_match: IfNoneMatch = None) -> Response:
    """Return the source that a kernel binary was compiled from."""
    text = service.repository.source_text(sha256)
    if text is None:
        raise _not_here(sha256)
    content = text.encode()
    return _immutable(SourceText, content, digest_of(content).hexdigest(), if_none_match)


def _not_here(sha256: str) -> HTTPException:
    return HTTPException(
        HTTPStatus.NOT_FOUND,
        f"the artifact {sha256} is not in this store; resolve the problem again.",
    )


def _immutable(
    kind: type[Response], content: bytes, digest: str, if_none_match: str | None
) -> Response:
    tag = quoted(digest)
    headers = {
        "ETag": tag,
        "Cache-Control": "public, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
    }
    if matches(if_none_match, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return kind(content, headers=headers)
