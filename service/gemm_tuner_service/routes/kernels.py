"""`GET /v1/kernels`: the form of the question for people and curl."""

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Response

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.middleware.named_twice import NAMES_ONCE
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import KernelQuery, Resolution

router = APIRouter(tags=["kernels"], responses=RESPONSES, dependencies=[NAMES_ONCE])


@router.get("/v1/kernels", response_model=Resolution, responses={304: {"description": "Unchanged"}})
async def find_kernel(
    query: Annotated[KernelQuery, Query()],
    service: Service,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say which kernel should run a problem."""
    cpu = await to_thread.run_sync(service.cpus.named, query.cpu, query.isa)
    context = ExecutionContext(threads=query.threads, regime=query.regime)
    answer = await service.gathering.answer(Asked.of(query.to_problem(), cpu, context))
    return tagged(answer, if_none_match)
