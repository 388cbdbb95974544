"""`GET /v1/misses`: what was asked for most and is not tuned."""

from typing import Annotated

from fastapi import APIRouter, Query

from gemm_tuner_service.bounds import MAX_PAGE
from gemm_tuner_service.dependencies import RequestWork, Service
from gemm_tuner_service.jobs.job_schemas import MissesPage, MissView
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import IN_DIGITS

router = APIRouter(tags=["jobs"], responses=RESPONSES)


@router.get("/v1/misses")
def list_misses(
    service: Service,
    work: RequestWork,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), IN_DIGITS] = 100,
) -> MissesPage:
    """Return the questions without a measured answer, what all callers asked most first."""
    work.charge(limit)
    found = service.misses.most_wanted(limit)
    return MissesPage(misses=[MissView.of(miss) for miss in found])
