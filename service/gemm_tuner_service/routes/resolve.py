"""`POST /v1/resolve` and its batch: the form of the question for programs."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Response

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidInput
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import RunningService, Service
from gemm_tuner_service.problems import describe
from gemm_tuner_service.schemas import (
    BatchItem,
    BatchRequest,
    BatchResolution,
    Resolution,
    ResolveRequest,
)

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
    resolution = service.resolve(
        question.to_problem(),
        cpu=service.described_cpu(question.cpu),
        context=question.to_context(),
        now=datetime.now(UTC),
    )
    return tagged(resolution, if_none_match)


@router.post("/v1/resolve:batch")
def resolve_batch(batch: BatchRequest, service: Service) -> BatchResolution:
    """Say which kernels should run many problems, or one layer for several m, on one CPU."""
    cpu, context = service.described_cpu(batch.cpu), batch.to_context()
    now = datetime.now(UTC)
    if batch.max_loss is not None:
        resolutions = service.resolve_layer(
            [Problem.parse(text) for text in batch.problems],
            cpu=cpu,
            context=context,
            max_loss=batch.max_loss,
            now=now,
        )
        return BatchResolution(
            results=[
                BatchItem(problem=text, resolution=resolution)
                for text, resolution in zip(batch.problems, resolutions, strict=True)
            ]
        )
    return BatchResolution(
        results=[
            _resolve_item(service, text, cpu=cpu, context=context, now=now)
            for text in batch.problems
        ]
    )


def _resolve_item(
    service: RunningService, text: str, *, cpu: Cpu, context: ExecutionContext, now: datetime
) -> BatchItem:
    try:
        resolution = service.resolve(Problem.parse(text), cpu=cpu, context=context, now=now)
    except InvalidInput as error:
        return BatchItem(problem=text, error=describe(error))
    return BatchItem(problem=text, resolution=resolution)
