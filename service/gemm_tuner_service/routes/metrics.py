"""`GET /metrics`: how the service does, for Prometheus."""

from fastapi import APIRouter, Response

from gemm_tuner_service.metrics import MEDIA_TYPE, render

router = APIRouter(tags=["service"])


class Numbers(Response):
    """Numbers in the text format of Prometheus."""

    media_type = MEDIA_TYPE


@router.get("/metrics", response_class=Numbers)
def read_metrics() -> Response:
    """Return how many requests were answered, how fast, and what the process uses."""
    return Numbers(render())
