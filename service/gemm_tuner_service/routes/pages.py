"""The pages for people: overview, CPUs, problems, kernels, jobs, and what is wanted."""

from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.context import ExecutionContext, Regime, check_threads
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs.queue import UNTAKEN
from gemm_tuner.store.listing import MAX_PLACES, Cursor
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.verdicts.figures import Standing
from gemm_tuner_service.dashboard import counted, overview
from gemm_tuner_service.dashboard import problem as of_problem
from gemm_tuner_service.dashboard.render import render, style
from gemm_tuner_service.dependencies import Asking, RequestWork, Service
from gemm_tuner_service.routing import STYLE

PAGE_COST = 300  # a page takes as long as so many answers
LISTED_AT_ONCE = 50
JOBS_AT_ONCE = 50
WANTED_AT_ONCE = 200

_MAX_DIGITS = 9
_DIGEST_LETTERS = 64
_JOB_LETTERS = 32

_ALL_MARKS = tuple(mark.value for mark in counted.MARKS)
_Text = Annotated[str, Query(max_length=1000)]
_ShortText = Annotated[str, Query(max_length=200)]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def read_overview(
    request: Request, service: Service, caller: Asking, work: RequestWork
) -> Response:
    """Show what the service knows and does."""
    work.charge(PAGE_COST)
    known = service.tallies.counted()
    tallies = known.tallies
    cpus = counted.of_cpus(
        tallies, overview.names_of(service, (tally.cpu_key for tally in tallies.groups))
    )
    return _page(
        request,
        "overview.html.j2",
        marks=_ALL_MARKS,
        old_at=known.old_at,
        total=counted.Counts.sum_of(tallies.groups),
        cpus=cpus,
        cpus_picture=counted.cpus_picture(cpus),
        shapes=counted.of_shapes(tallies),
        shapes_picture=counted.shapes_picture(tallies),
        ratios=counted.ratio_steps(tallies),
        shares=counted.share_steps(tallies),
        jobs=overview.live_jobs(service, caller),
        wanted=overview.wanted(service, caller, overview.WANTED),
        health=overview.health_of(service, caller),
    )


@router.get("/cpus")
def list_cpus(request: Request, service: Service, work: RequestWork) -> Response:
    """Show the CPUs on which something was measured."""
    work.charge(PAGE_COST)
    known = service.tallies.counted()
    tallies = known.tallies
    rows = counted.of_cpus(
        tallies, overview.names_of(service, (tally.cpu_key for tally in tallies.groups))
    )
    return _page(
        request,
        "cpus.html.j2",
        marks=_ALL_MARKS,
        old_at=known.old_at,
        cpus=rows,
        cpus_picture=counted.cpus_picture(rows),
    )


@router.get("/cpus/{cpu_key}")
def read_cpu(
    request: Request,
    *,
    cpu_key: str,
    service: Service,
    caller: Asking,
    work: RequestWork,
    standing: _ShortText = "",
    cursor: _ShortText = "",
) -> Response:
    """Show what is tuned on a CPU, the greatest ratio first, and its features."""
    work.charge(PAGE_COST)
    if "\0" in cpu_key:  # PostgreSQL cannot even be asked
        raise _not_found(f"there is no CPU with the key {cpu_key}")
    known = service.tallies.counted(cpu_key)
    tallies = known.tallies
    is_known = bool(tallies.groups) or service.listing.has_cpu(cpu_key)
    cpu = service.repository.cpu(cpu_key) if is_known else None
    if cpu is None:
        raise _not_found(f"nothing was tried here on a CPU with the key {cpu_key}")
    if standing and standing not in _ALL_MARKS:
        raise HTTPException(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"standing {standing!r} is not known; use one of: {', '.join(_ALL_MARKS)}.",
        )
    page = service.listing.of_cpu(
        cpu_key,
        limit=LISTED_AT_ONCE,
        after=Cursor.parse(cursor) if cursor else None,
        standing=Standing(standing) if standing else None,
    )
    following = {"standing": standing} if standing else {}
    if page.next_cursor is not None:
        following["cursor"] = page.next_cursor.text
    return _page(
        request,
        "cpu.html.j2",
        marks=_ALL_MARKS,
        old_at=known.old_at,
        cpu=cpu,
        total=counted.Counts.sum_of(tallies.groups),
        kinds=counted.of_kinds(tallies),
        ratios=counted.ratio_steps(tallies, cpu_key),
        shares=counted.share_steps(tallies, cpu_key),
        rows=page.rows,
        query_of=_query_of,
        standing=standing,
        is_first=not cursor,
        following=urlencode(following) if page.next_cursor is not None else "",
        workers=overview.workers_of(service, caller, cpu.class_key),
    )


@router.get("/problems")
def find_problem(
    request: Request, service: Service, work: RequestWork, text: _Text = ""
) -> Response:
    """Go to the page of the problem with this text, or of a range that holds its m.

    Where nothing was tried of either, say so.
    """
    work.charge(1)
    if not text.strip():
        return _page(request, "find.html.j2", problem=None)
    problem = Problem.parse(text.replace(" + ", "+"))
    is_known = service.listing.of_problem(problem_id(problem))
    key = problem_id(problem) if is_known else service.listing.range_with(problem)
    if key is not None:
        return Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": f"/problems/{key}"})
    return _page(request, "find.html.j2", status=HTTPStatus.NOT_FOUND, problem=problem.text)


@router.get("/problems/{key}")
def read_problem(
    request: Request,
    *,
    key: str,
    service: Service,
    work: RequestWork,
    cpu: _ShortText = "",
    threads: _ShortText = "",
    regime: _ShortText = "",
    before: _ShortText = "",
) -> Response:
    """Show what was tried of a problem, in one place: a CPU, number of threads and regime."""
    work.charge(PAGE_COST)
    problem = service.listing.problem(key) if _is_hex(key, _DIGEST_LETTERS) else None
    places = service.listing.of_problem(key) if problem else ()
    if problem is None or not places:
        raise _not_found("nothing was tried here of a problem with this key")
    fitting = service.listing.of_problem(key, **_asked_place(cpu, threads, regime))
    place = of_problem.chosen_place(fitting)
    if place is None:
        raise _not_found(f"nothing was tried here of {problem.text} in this place")
    tried = service.listing.tried(
        key,
        place.cpu_key,
        place.context,
        limit=of_problem.TRIED_AT_ONCE,
        before=_number(before),
    )
    attempts = of_problem.attempts_of(service, tried.trials)
    curve = of_problem.curve_of(service.listing.of_layer(problem, place.cpu_key, place.context))
    asked = {"cpu": place.cpu_key, "threads": place.context.threads}
    asked["regime"] = place.context.regime.value
    following = {**asked, "before": tried.next_before}
    return _page(
        request,
        "problem.html.j2",
        problem=problem,
        places=places,
        are_all_places=len(places) < MAX_PLACES,
        place=place,
        query_of=_query_of,
        attempts=attempts,
        attempts_picture=of_problem.attempts_picture(attempts, place, _number(before)),
        curve=curve,
        curve_picture=of_problem.curve_picture(curve, place),
        explain=of_problem.explain(service, place),
        is_first=not before,
        newest=urlencode(asked),
        following=urlencode(following) if tried.next_before is not None else "",
    )


@router.get("/kernels/{sha256}")
def read_kernel(request: Request, sha256: str, service: Service, work: RequestWork) -> Response:
    """Show the source that a kernel was compiled from."""
    work.charge(PAGE_COST)
    is_served = _is_hex(sha256, _DIGEST_LETTERS) and sha256 in service.repository.held_artifacts(
        [sha256]
    )
    source = service.repository.source_text(sha256) if is_served else None
    if source is None:
        raise _not_found("no kernel with this sha256 may be served from this store")
    return _page(request, "kernel.html.j2", sha256=sha256, source=source)


@router.get("/jobs")
def list_jobs(
    request: Request,
    *,
    service: Service,
    caller: Asking,
    work: RequestWork,
    state: _ShortText = "",
    before: _ShortText = "",
) -> Response:
    """Show the jobs that the caller may see, the newest first."""
    work.charge(PAGE_COST)
    states = [each.value for each in JobState]
    if state and state not in states:
        raise HTTPException(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"state {state!r} is not known; use one of: {', '.join(states)}.",
        )
    if before and not _is_hex(before, _JOB_LETTERS):
        raise HTTPException(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{before!r} is no id of a job; begin at /jobs."
        )
    jobs = service.desk.newest(
        caller,
        state=JobState(state) if state else None,
        limit=JOBS_AT_ONCE + 1,
        before=before or None,
    )
    following = {"state": state} if state else {}
    if len(jobs) > JOBS_AT_ONCE:
        following["before"] = jobs[JOBS_AT_ONCE - 1].id
    return _page(
        request,
        "jobs.html.j2",
        jobs=jobs[:JOBS_AT_ONCE],
        states=states,
        state=state,
        is_first=not before,
        following=urlencode(following) if "before" in following else "",
    )


@router.get("/jobs/{job_id}")
def read_job(
    request: Request, job_id: str, service: Service, caller: Asking, work: RequestWork
) -> Response:
    """Show a job, and how far it is."""
    work.charge(PAGE_COST)
    if not _is_hex(job_id, _JOB_LETTERS):
        raise _not_found(f"{job_id} is no id of a job")
    job = service.desk.find(job_id, caller)
    key = problem_id(job.problem)
    may_see = Scope.RESOLVE in caller.scopes and bool(service.listing.of_problem(key))
    view = service.desk.view(job)
    return _page(
        request,
        "job.html.j2",
        job=view,
        key=key if may_see else "",
        untaken_days=UNTAKEN.days,
    )


@router.get("/wanted")
def list_wanted(request: Request, service: Service, caller: Asking, work: RequestWork) -> Response:
    """Show what was asked for most and is not tuned."""
    work.charge(PAGE_COST)
    return _page(
        request,
        "wanted.html.j2",
        wanted=overview.wanted(service, caller, WANTED_AT_ONCE),
        most=WANTED_AT_ONCE,
    )


@router.get(STYLE)
def read_style() -> Response:
    """Return the style of all pages."""
    return Response(
        style(), media_type="text/css", headers={"Cache-Control": "public, max-age=300"}
    )


def _page(
    request: Request,
    template: str,
    *,
    status: HTTPStatus = HTTPStatus.OK,
    **values: Any,  # noqa: ANN401 - of a template
) -> Response:
    return HTMLResponse(render(request.scope, template, **values), status_code=status)


def _query_of(cpu_key: str, context: ExecutionContext) -> str:
    """Return the query that asks for a place of a problem."""
    return urlencode({"cpu": cpu_key, "threads": context.threads, "regime": context.regime.value})


def _asked_place(cpu: str, threads: str, regime: str) -> dict[str, Any]:
    """Return what a query says of a place, for `Listing.of_problem`.

    Raises:
        InvalidSetting: it is no number of threads, or no regime.
    """
    return {
        # PostgreSQL has no text with a NUL, and no CPU a blank key.
        "cpu_key": cpu.replace("\0", " ") or None,
        "threads": check_threads(_number(threads) or 0) if threads else None,
        "regime": Regime.parse_one(regime) if regime else None,
    }


def _number(text: str) -> int | None:
    """Return the number that a query gives, None without one."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise HTTPException(
            HTTPStatus.UNPROCESSABLE_ENTITY, f"{text!r} is no number that is used here."
        )
    return int(text)


def _is_hex(text: str, letters: int) -> bool:
    return len(text) == letters and not set(text) - set("0123456789abcdef")


def _not_found(what: str) -> HTTPException:
    return HTTPException(
        HTTPStatus.NOT_FOUND, f"{what}; begin at the overview, or ask for a problem by its text."
    )
