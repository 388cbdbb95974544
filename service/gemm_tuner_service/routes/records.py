"""`GET /v1/records`: what was tried and what came of it, failures included."""

from typing import Annotated

from fastapi import APIRouter, Query

from gemm_tuner.store.wire.record import WireRecord
from gemm_tuner_service.bounds import MAX_PAGE
from gemm_tuner_service.dependencies import RequestWork, Service
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.schemas import IN_DIGITS, RecordsPage

router = APIRouter(tags=["records"], responses=RESPONSES)


@router.get("/v1/records")
def list_records(
    service: Service,
    work: RequestWork,
    cursor: Annotated[int, Query(ge=0, lt=2**31), IN_DIGITS] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), IN_DIGITS] = 100,
) -> RecordsPage:
    """Return records in the order they were made, a page at a time."""
    work.charge(limit)
    page = service.repository.page(after=cursor, limit=limit)
    return RecordsPage(
        records=[WireRecord.of(trial) for trial in page.trials], next_cursor=page.next_after
    )
