"""`/v1/jobs`: problems that are to be tuned, how far they are, and their end."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from gemm_tuner.domain.job import Job, JobState
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.bounds import MAX_PAGE
from gemm_tuner_service.dependencies import Asking, RequestWork, RunningService, Service
from gemm_tuner_service.jobs.job_schemas import (
    EstimateView,
    JobEvent,
    JobRequest,
    JobsPage,
    JobView,
    url_of,
)
from gemm_tuner_service.jobs.job_watch import JobWatch
from gemm_tuner_service.middleware.head import is_head
from gemm_tuner_service.middleware.lasting import Lasting, let_last
from gemm_tuner_service.middleware.named_twice import NAMES_ONCE
from gemm_tuner_service.problems import RESPONSES, describe
from gemm_tuner_service.schemas import IN_DIGITS

STREAM_S = 300.0  # so long at most does a token that was revoked go on
HEARTBEAT_S = 15.0

_ESTIMATE_COST = 1000  # of many rows, an estimate takes as long as so many answers
_RETRY_MS = 2000  # until a browser asks again for a stream that ended
_MAX_EVENT_ID_DIGITS = 18
_EVENTS = "text/event-stream"

router = APIRouter(tags=["jobs"], responses=RESPONSES, dependencies=[NAMES_ONCE])

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", description="the id of a job, in hex")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[\x20-\x7e]{1,128}$",
        description="whoever sends the same key again gets the same job",
    ),
]


@router.post(
    "/v1/jobs",
    response_model=JobView,
    status_code=HTTPStatus.ACCEPTED,
    responses={
        200: {"model": JobView | EstimateView, "description": "It was there, or the estimate"},
        202: {"description": "It is new"},
    },
)
def submit_job(
    question: JobRequest,
    service: Service,
    caller: Asking,
    work: RequestWork,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Let a problem be tuned. While one like it waits or runs, it is that job."""
    asked = Asked.of(
        question.to_problem(), service.cpus.described(question.cpu), question.to_context()
    )
    if question.dry_run:
        work.charge(_ESTIMATE_COST)
        with service.desk.estimating():
            estimate = _estimate(service, asked, question.budget_s)
        return Response(estimate.model_dump_json(), media_type="application/json")
    job, is_new = service.desk.submit(
        asked,
        caller,
        budget_s=question.budget_s,
        priority=question.priority,
        idempotency_key=idempotency_key,
    )
    return Response(
        service.desk.view(job).model_dump_json(),
        status_code=HTTPStatus.ACCEPTED if is_new else HTTPStatus.OK,
        headers={"Location": url_of(job)},
        media_type="application/json",
    )


@router.get("/v1/jobs")
def list_jobs(
    service: Service,
    caller: Asking,
    work: RequestWork,
    state: Annotated[JobState | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE), IN_DIGITS] = 100,
) -> JobsPage:
    """Return the jobs that the caller asked for, or with `admin` all, the newest first."""
    work.charge(limit)
    return JobsPage(jobs=service.desk.newest(caller, state=state, limit=limit))


@router.get("/v1/jobs/{job_id}")
def read_job(job_id: JobId, service: Service, caller: Asking) -> JobView:
    """Return a job, and how far it is."""
    return service.desk.view(service.desk.find(job_id, caller))


@router.post("/v1/jobs/{job_id}:cancel")
def cancel_job(job_id: JobId, service: Service, caller: Asking) -> JobView:
    """End a job, and keep the best that it found. One that is over stays as it is."""
    return service.desk.view(service.desk.cancel(job_id, caller))


@router.get(
    "/v1/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {_EVENTS: {"schema": {"type": "string"}}}},
        204: {"description": "The job is over, and the caller was told"},
    },
)
async def follow_job(
    job_id: JobId,
    request: Request,
    service: Service,
    caller: Asking,
    last_event_id: Annotated[
        str | None, Header(description="the newest event that the caller has; else all are sent")
    ] = None,
) -> Response:
    """Send an event `progress` at each change of a job, and `end` at its end.

    Where the job cannot be read any more, `problem` is the last, with a problem document.
    The id of an event is the revision of the job. Of changes in quick succession only the last is
    sent. A stream ends with its job, or after 5 minutes: ask again with the id of the last event.
    """
    job = await to_thread.run_sync(service.desk.find, job_id, caller)
    known = _revision_in(last_event_id)
    if known > job.revision:  # of no event that there was
        known = 0
    if job.state.is_over and known == job.revision:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if is_head(request.scope):
        return Response(media_type=_EVENTS, headers=headers)
    lasting = let_last(request.scope, STREAM_S)
    events = _events(service.desk.watch, job, known, lasting)
    return StreamingResponse(events, media_type=_EVENTS, headers=headers)


async def _events(watch: JobWatch, job: Job, known: int, lasting: Lasting) -> AsyncIterator[str]:
    """Yield the events of a job behind its revision `known`, and a comment where nothing comes."""
    yield f"retry: {_RETRY_MS}\n\n"
    with watch.follow(job, lasting.wake) as followed:
        while not followed.is_over:
            if followed.job.revision > known:
                known = followed.job.revision
                yield _event("progress", followed.job)
            await lasting.pause(HEARTBEAT_S)
            if lasting.rest_s == 0:
                return
            if followed.job.revision == known:
                yield ": nothing new\n\n"
        if followed.fault is not None:
            yield f"event: problem\ndata: {describe(followed.fault).text}\n\n"
        else:
            yield _event("end", followed.job)


def _event(name: str, job: Job) -> str:
    return f"id: {job.revision}\nevent: {name}\ndata: {JobEvent.of(job).model_dump_json()}\n\n"


def _revision_in(last_event_id: str | None) -> int:
    """Return the revision that an id of an event names, 0 if it is none of ours."""
    text = (last_event_id or "").strip()
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_EVENT_ID_DIGITS
    return int(text) if is_number else 0


def _estimate(service: RunningService, asked: Asked, budget_s: float) -> EstimateView:
    """Return what a job would take.

    Raises:
        InvalidProblem: the problem multiplies nothing.
        NoKernelFamily: nothing can be tuned for it on such a CPU.
    """
    problem, context, cpu = asked.problem, asked.context, asked.cpu
    problem.check_work(context.regime)
    if service.estimate is None:
        # NumPy and the space take long to load.
        from gemm_tuner.space.candidates import Space  # noqa: PLC0415

        space = Space(problem=problem, cpu=cpu, threads=context.threads)
        space.defaults()
        return EstimateView(candidates=space.size(), estimated_seconds=None)
    found = service.estimate(problem, context, cpu, budget_s)
    return EstimateView(candidates=found.candidates, estimated_seconds=found.seconds)
