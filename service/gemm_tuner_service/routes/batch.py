"""`POST /v1/resolve:batch`: many questions in one request."""

from datetime import UTC, datetime

from fastapi import APIRouter, Response

from gemm_tuner_service.dependencies import RequestWork, Service
from gemm_tuner_service.schemas import BatchRequest, BatchResolution

router = APIRouter(tags=["kernels"])


@router.post("/v1/resolve:batch", response_model=BatchResolution)
def resolve_batch(batch: BatchRequest, service: Service, work: RequestWork) -> Response:
    """Say which kernels should run many problems, or one layer for several m, on one CPU."""
    work.charge(len(batch.problems))
    texts, cpu, context = batch.problems, service.cpus.described(batch.cpu), batch.to_context()
    now = datetime.now(UTC)
    if batch.max_loss is None:
        results = service.resolver.resolve_each(texts, cpu=cpu, context=context, now=now)
    else:
        results = service.resolver.resolve_layer(
            texts, cpu=cpu, context=context, max_loss=batch.max_loss, now=now
        )
    content = b'{"results":[%b]}' % b",".join(results)
    return Response(content, media_type="application/json")
