"""`GET /v1/revocations`: what clients must not load any more."""

from datetime import UTC, datetime, time
from typing import Annotated

from fastapi import APIRouter, Header, Response

from gemm_tuner.trust.revocations import SignedRevocations, sign_revocations
from gemm_tuner_service.answers import Answer
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Service

router = APIRouter(tags=["service"])


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
    revoked = service.repository.revocations()
    signed = sign_revocations(revoked, service.key_pair, issued_at=issued_at)
    return tagged(Answer.of(signed), if_none_match)
