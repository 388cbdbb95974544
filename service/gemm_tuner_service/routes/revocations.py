"""`/v1/revocations`: what clients must not load any more, and how it comes to be there."""

from datetime import UTC, datetime, time
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Path, Query, Response

from gemm_tuner.domain.revocation import SUBJECT
from gemm_tuner.trust.revocations import SignedRevocations, sign_revocations
from gemm_tuner_service.answering.answers import Answer
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Asking, Service
from gemm_tuner_service.middleware.named_twice import NAMES_ONCE
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import Reason, RevocationRequest

router = APIRouter(tags=["service"], responses=RESPONSES, dependencies=[NAMES_ONCE])

Subject = Annotated[
    str,
    Path(pattern=rf"^{SUBJECT}$", description="sha256 of a kernel, or id of a signing key, in hex"),
]


@router.get(
    "/v1/revocations",
    response_model=SignedRevocations,
    responses={304: {"description": "Unchanged"}},
)
def list_revocations(
    service: Service, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Return the kernels and signing keys that are revoked, signed; the list is whole."""
    issued_at = datetime.combine(datetime.now(UTC), time.min, tzinfo=UTC)

    def sign() -> Answer:
        revoked = service.repository.revocations()
        signed = sign_revocations(revoked, service.key_pair, issued_at=issued_at)
        return Answer.of(signed.model_dump_json().encode(), is_lasting=True)

    return tagged(service.lists.get("revocations", issued_at.date(), sign), if_none_match)


@router.put(
    "/v1/revocations/{subject}",
    status_code=HTTPStatus.CREATED,
    responses={200: {"description": "It was revoked already"}, 201: {"description": "It is now"}},
    response_class=Response,
)
def revoke(
    subject: Subject, revocation: RevocationRequest, service: Service, caller: Asking
) -> Response:
    """Withdraw a kernel or a signing key from everyone who has it."""
    is_new = service.repository.revoke(
        subject, reason=revocation.reason, actor=caller.name, now=datetime.now(UTC)
    )
    return Response(status_code=HTTPStatus.CREATED if is_new else HTTPStatus.OK)


@router.delete(
    "/v1/revocations/{subject}", status_code=HTTPStatus.NO_CONTENT, response_class=Response
)
def lift(
    subject: Subject,
    service: Service,
    caller: Asking,
    reason: Annotated[Reason, Query()],
) -> Response:
    """Lift a revocation."""
    was_there = service.repository.lift(
        subject, reason=reason, actor=caller.name, now=datetime.now(UTC)
    )
    if not was_there:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"{subject} is not revoked.")
    return Response(status_code=HTTPStatus.NO_CONTENT)
