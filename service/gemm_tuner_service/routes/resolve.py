"""`POST /v1/resolve` and its batch: the form of the question for programs."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Response

from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.schemas import BatchRequest, BatchResolution, Resolution, ResolveRequest

router = APIRouter(tags=["kernels"])


@router.post(
    "/v1/resolve", response_model=Resolution, responses={304: {"description": "Unchanged"}}
)
def resolve(
    question: ResolveRequest,
    service: Service,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say which kernel should run a problem. Nothing is tuned by asking."""
    resolution = service.resolver.resolve(
        question.to_problem(),
        cpu=service.cpus.described(question.cpu),
        context=question.to_context(),
        now=datetime.now(UTC),
    )
    return tagged(resolution, if_none_match)


@router.post("/v1/resolve:batch")
def resolve_batch(batch: BatchRequest, service: Service) -> BatchResolution:
    """Say which kernels should run many problems, or one layer for several m, on one CPU."""
    texts, cpu, context = batch.problems, service.cpus.described(batch.cpu), batch.to_context()
    now = datetime.now(UTC)
    if batch.max_loss is None:
        results = service.resolver.resolve_each(texts, cpu=cpu, context=context, now=now)
    else:
        results = service.resolver.resolve_layer(
            texts, cpu=cpu, context=context, max_loss=batch.max_loss, now=now
        )
    return BatchResolution(results=results)
