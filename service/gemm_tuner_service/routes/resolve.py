"""`POST /v1/resolve`: the form of the question for programs."""

from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, HTTPException, Query, Request, Response

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import Job
from gemm_tuner_service.answering.answers import Answer, Asked
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.clients.callers import Caller
from gemm_tuner_service.dependencies import Asking, RunningService, Service
from gemm_tuner_service.jobs.job_schemas import PendingResolution, Tuning, url_of
from gemm_tuner_service.middleware.named_twice import NAMES_ONCE
from gemm_tuner_service.problems import RESPONSES
from gemm_tuner_service.routes.lean_route import LeanResolveRoute
from gemm_tuner_service.schemas import Resolution, ResolveRequest

LONGEST_WAIT_S = 120

router = APIRouter(
    tags=["kernels"], route_class=LeanResolveRoute, responses=RESPONSES, dependencies=[NAMES_ONCE]
)

Wait = Annotated[
    str | None,
    Query(
        pattern=r"^(0|[1-9][0-9]?|1[01][0-9]|120)s$",
        description=f"how long to wait for a job, such as 30s; at most {LONGEST_WAIT_S}s",
    ),
]


@router.post(
    "/v1/resolve",
    response_model=Resolution,
    responses={
        202: {"model": PendingResolution, "description": "The answer for now; a job is in flight"},
        304: {"description": "Unchanged"},
    },
)
async def resolve(
    *,
    question: ResolveRequest,
    request: Request,
    service: Service,
    caller: Asking,
    tune: Annotated[
        Tuning | None, Query(description="let be tuned what was not measured; this needs `tune`")
    ] = None,
    wait: Wait = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Say which kernel should run a problem. Nothing is tuned by asking, but with `tune=auto`."""
    if tune is not None and Scope.TUNE not in caller.scopes:
        raise HTTPException(
            HTTPStatus.FORBIDDEN, f"tune=auto needs a token with the scope {Scope.TUNE}."
        )
    asked = Asked.of(
        question.to_problem(), service.cpus.described(question.cpu), question.to_context()
    )
    answer = await service.gathering.answer(asked)
    if answer.is_measured or (tune is None and wait is None):
        return tagged(answer, if_none_match)
    job = await to_thread.run_sync(_job_for, service, asked, caller, tune)
    if job is None:
        return tagged(answer, if_none_match)
    if wait is not None:
        seconds = min(float(wait.removesuffix("s")), LONGEST_WAIT_S)
        job = await service.desk.watch.wait_for_end(request, job, seconds)
    if job.state.is_over:
        again = partial(service.resolver.answer_anew, asked, datetime.now(UTC))
        answer = await service.gathering.run_slowly(again)
        return tagged(answer, if_none_match)
    return await to_thread.run_sync(_pending, service, answer, job, caller, if_none_match)


def _job_for(
    service: RunningService, asked: Asked, caller: Caller, tune: Tuning | None
) -> Job | None:
    return service.desk.in_flight(asked) if tune is None else service.desk.tune(asked, caller)


def _pending(
    service: RunningService, answer: Answer, job: Job, caller: Caller, if_none_match: str | None
) -> Response:
    """Return the answer for now with the job, if the caller may see that."""
    if Scope.TUNE not in caller.scopes or not service.desk.is_shown(job, caller):
        return tagged(answer, if_none_match)
    view = service.desk.view(job).model_dump_json().encode()
    return Response(
        b'%b,"job":%b}' % (answer.content.removesuffix(b"}"), view),
        status_code=HTTPStatus.ACCEPTED,
        headers={"Location": url_of(job), "Cache-Control": "no-store"},
        media_type="application/json",
    )
