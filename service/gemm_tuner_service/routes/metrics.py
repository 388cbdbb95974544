"""`GET /metrics`: how the service does, for Prometheus."""

from fastapi import APIRouter, Response

from gemm_tuner.errors import StoreFailed
from gemm_tuner_service.dependencies import Service
from gemm_tuner_service.metrics import MEDIA_TYPE, render
from gemm_tuner_service.problems import RESPONSES

router = APIRouter(tags=["service"], responses=RESPONSES)


class Numbers(Response):
    """Numbers in the text format of Prometheus."""

    media_type = MEDIA_TYPE


@router.get("/metrics", response_class=Numbers)
def read_metrics(service: Service) -> Response:
    """Return how many requests were answered, how fast, what the process uses, and all jobs."""
    try:
        jobs = service.desk.views.counts()
    except StoreFailed:  # the other numbers tell of it
        jobs = None
    return Numbers(render(jobs))
