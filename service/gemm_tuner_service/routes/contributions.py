"""What workers bring: records and artifacts, which are kept apart until they are accepted."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Path, Query, Request, Response

from gemm_tuner.domain.record import Trial
from gemm_tuner.errors import InvalidRecord
from gemm_tuner.store.wire.record import parse_record
from gemm_tuner_service.bounds import MAX_BATCH, MAX_FAULTS, MAX_PAGE
from gemm_tuner_service.dependencies import Asking, RequestWork, Service
from gemm_tuner_service.problems import RESPONSES, Fault, InvalidLines
from gemm_tuner_service.schemas import (
    IN_DIGITS,
    ContributionsPage,
    ContributionView,
    RecordsReceipt,
)

router = APIRouter(tags=["contributions"], responses=RESPONSES)

Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the binary's digest, in hex")]


@router.post(
    "/v1/records",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
        }
    },
)
async def contribute_records(
    request: Request, service: Service, caller: Asking, work: RequestWork
) -> RecordsReceipt:
    """Keep up to 1000 records, one a line. If a line is none, nothing is kept.

    They are candidates: no other token sees them, and none is served. When they are accepted, a
    sweep starts from them, and builds and measures anew. The same records may be sent again.
    """
    body = await request.body()

    def keep() -> RecordsReceipt:
        lines = body.split(b"\n")
        count = sum(1 for line in lines if line.strip())
        if count > MAX_BATCH:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"there are {count} records; send at most {MAX_BATCH} at once.",
            )
        work.charge(count)
        trials = _parse(lines)
        added = service.contributions.add_records(
            trials, owner=caller.owner, actor=caller.name, now=datetime.now(UTC)
        )
        return RecordsReceipt(added=added, known=len(trials) - added)

    return await to_thread.run_sync(keep)


@router.put(
    "/v1/artifacts/sha256/{sha256}",
    status_code=HTTPStatus.CREATED,
    responses={200: {"description": "It was there"}, 201: {"description": "It is kept"}},
    response_class=Response,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def contribute_artifact(
    sha256: Sha256, request: Request, service: Service, caller: Asking, work: RequestWork
) -> Response:
    """Keep a kernel binary, to be compared with what is built here. It is never served."""
    binary = await request.body()

    def keep() -> bool:
        work.charge(1 + len(binary) // 2**14)
        return service.contributions.add_artifact(
            sha256, binary, owner=caller.owner, actor=caller.name, now=datetime.now(UTC)
        )

    is_new = await to_thread.run_sync(keep)
    return Response(status_code=HTTPStatus.CREATED if is_new else HTTPStatus.OK)


@router.get("/v1/contributions")
def list_contributions(
    service: Service,
    caller: Asking,
    work: RequestWork,
    cursor: Annotated[int, Query(ge=0, lt=2**31), IN_DIGITS] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), IN_DIGITS] = 100,
) -> ContributionsPage:
    """Return what the caller contributed and is not accepted yet, a page at a time."""
    work.charge(limit)
    found = service.contributions.of(caller.owner, after=cursor, limit=limit)
    return ContributionsPage(
        contributions=[ContributionView.of(each) for each in found],
        next_cursor=found[-1].sequence if len(found) == limit else None,
    )


def _parse(lines: list[bytes]) -> list[Trial]:
    """Return the records in `lines`.

    Raises:
        InvalidLines: some are none.
    """
    trials: list[Trial] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            trials.append(parse_record(line))
        except InvalidRecord as error:
            faults.append(Fault(line=number, pointer=error.pointer, detail=str(error)))
    if faults:
        raise InvalidLines(faults[:MAX_FAULTS], count=len(faults))
    return trials
