"""`GET /v1/kernels`: the form of the question for people and curl."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner_service.answers import Asked
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.schemas import KernelQuery, Resolution

router = APIRouter(tags=["kernels"])


@router.get("/v1/kernels", response_model=Resolution, responses={304: {"description": "Unchanged"}})
def find_kernel(
    query: Annotated[KernelQuery, Query()],
    service: Service,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say which kernel should run a problem."""
    answer = service.resolver.answer(
        Asked.of(
            query.to_problem(),
            service.cpus.named(query.cpu, query.isa),
            ExecutionContext(threads=query.threads, regime=query.regime),
        ),
        datetime.now(UTC),
    )
    return tagged(answer, if_none_match)
