"""`POST /v1/resolve`: the form of the question for programs."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Response

from gemm_tuner_service.answers import Asked
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.lean_route import LeanResolveRoute
from gemm_tuner_service.schemas import Resolution, ResolveRequest

router = APIRouter(tags=["kernels"], route_class=LeanResolveRoute)


@router.post(
    "/v1/resolve", response_model=Resolution, responses={304: {"description": "Unchanged"}}
)
def resolve(
    question: ResolveRequest,
    service: Service,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say which kernel should run a problem. Nothing is tuned by asking."""
    answer = service.resolver.answer(
        Asked.of(
            question.to_problem(), service.cpus.described(question.cpu), question.to_context()
        ),
        datetime.now(UTC),
    )
    return tagged(answer, if_none_match)
