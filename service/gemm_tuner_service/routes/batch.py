"""`POST /v1/resolve:batch`: many questions in one request."""

from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Response

from gemm_tuner_service.answering.resolver import batch_item
from gemm_tuner_service.dependencies import RequestWork, Service
from gemm_tuner_service.middleware.named_twice import NAMES_ONCE
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import BatchRequest, BatchResolution

router = APIRouter(tags=["kernels"], responses=RESPONSES, dependencies=[NAMES_ONCE])


@router.post("/v1/resolve:batch", response_model=BatchResolution)
async def resolve_batch(batch: BatchRequest, service: Service, work: RequestWork) -> Response:
    """Say which kernels should run many problems, or one layer for several m, on one CPU."""
    work.charge(len(batch.problems))
    texts, cpu, context = batch.problems, service.cpus.described(batch.cpu), batch.to_context()
    if batch.max_loss is None:
        answered = await service.gathering.answer_texts(texts, cpu=cpu, context=context)
        results = [batch_item(*each) for each in zip(texts, answered, strict=True)]
    else:
        resolve_layer = partial(
            service.resolver.resolve_layer,
            texts,
            cpu=cpu,
            context=context,
            max_loss=batch.max_loss,
            now=datetime.now(UTC),
        )
        results = await service.gathering.run_slowly(lambda: list(resolve_layer()))
    content = b'{"results":[%b]}' % b",".join(results)
    return Response(content, media_type="application/json")
