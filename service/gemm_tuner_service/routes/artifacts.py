"""`/v1/artifacts`: kernel binaries and their sources, by content and so for ever the same.

The C header that they are called by is at `/v1/abi`.
"""

import re
from hashlib import sha256 as digest_of
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Path, Response

from gemm_tuner.resources import templates_dir
from gemm_tuner_service.caching import matches, quoted
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.problems import RESPONSES

router = APIRouter(tags=["artifacts"], responses=RESPONSES)

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the binary's digest, in hex")]
IfNoneMatch = Annotated[str | None, Header()]
Range = Annotated[
    str | None, Header(alias="Range", description="one range of bytes, such as bytes=0-1023")
]

_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_RESPONSES: dict[int | str, dict[str, Any]] = {
    206: {"description": "The range of bytes that was asked for"},
    304: {"description": "Unchanged"},
}


class Binary(Response):
    """A shared library."""

    media_type = "application/octet-stream"


class SourceText(Response):
    """A C++ source."""

    media_type = "text/x-c++src"


class HeaderText(Response):
    """A C header."""

    media_type = "text/x-chdr"


@router.get("/v1/artifacts/sha256/{sha256}", response_class=Binary, responses=_RESPONSES)
def read_artifact(
    sha256: Sha256,
    service: Service,
    if_none_match: IfNoneMatch = None,
    wanted: Range = None,
) -> Response:
    """Return a kernel binary."""
    binary = service.repository.binary(sha256)
    if binary is None:
        raise _not_here(sha256)
    return _immutable(Binary, binary, sha256, if_none_match, wanted)


@router.get("/v1/abi/gemm_tuner.h", response_class=HeaderText)
def read_header(if_none_match: IfNoneMatch = None) -> Response:
    """Return the C header of the kernel ABI, for programs that call a kernel without Python."""
    content = (templates_dir() / "abi" / "gemm_tuner.h").read_bytes()
    tag = quoted(digest_of(content).hexdigest())
    headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    if matches(if_none_match, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return HeaderText(content, headers=headers)


@router.get("/v1/artifacts/sha256/{sha256}/source", response_class=SourceText)
def read_source(sha256: Sha256, service: Service, if_none_match: IfNoneMatch = None) -> Response:
    """Return the source that a kernel binary was compiled from."""
    is_served = sha256 in service.repository.held_artifacts([sha256])
    text = service.repository.source_text(sha256) if is_served else None
    if text is None:
        raise _not_here(sha256)
    content = text.encode()
    return _immutable(SourceText, content, digest_of(content).hexdigest(), if_none_match)


def _not_here(sha256: str) -> HTTPException:
    return HTTPException(
        HTTPStatus.NOT_FOUND,
        f"the artifact {sha256} is not in this store, or not attested; resolve the problem again.",
    )


def _immutable(
    kind: type[Response],
    content: bytes,
    digest: str,
    if_none_match: str | None,
    wanted: str | None = None,
) -> Response:
    tag = quoted(digest)
    headers = {
        "ETag": tag,
        "Cache-Control": "public, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
    }
    if matches(if_none_match, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    headers["Accept-Ranges"] = "bytes" if kind is Binary else "none"
    part = None if wanted is None else _range_of(wanted, len(content))
    if part is None:
        return kind(content, headers=headers)
    headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(content)}"
    return kind(
        content[part.start : part.stop], status_code=HTTPStatus.PARTIAL_CONTENT, headers=headers
    )


def _range_of(wanted: str, size_bytes: int) -> range | None:
    """Return the bytes of a header Range; None, for all of them, if it is not of the known form.

    Raises:
        HTTPException: the range begins behind the end.
    """
    match = _RANGE.fullmatch(wanted.strip())
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1 if last else size_bytes)
        if last and int(last) < start:
            return None
    if start >= size_bytes or start >= stop:
        raise HTTPException(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"the range {wanted!r} is not within the {size_bytes} bytes; ask for less.",
            headers={"Content-Range": f"bytes */{size_bytes}"},
        )
    return range(start, stop)
