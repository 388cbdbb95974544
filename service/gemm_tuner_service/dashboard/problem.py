"""What the page of a problem shows: its places, what was tried in one, and its speed over m."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gemm_tuner.derive import decide_by
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.units import context_text
from gemm_tuner.errors import InvalidProblem
from gemm_tuner.select.lookup import TrialsNeeded
from gemm_tuner.store.listing import Listed
from gemm_tuner.store.verdicts.figures import Standing
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.dashboard import drawings
from gemm_tuner_service.dashboard.pictures import PICTURES, Picture
from gemm_tuner_service.dependencies import RunningService

TRIED_AT_ONCE = 25
_LEAST_POINTS = 2

_TOO_LONG = (
    "The answer follows from trials that have to be read for it, which takes longer than a page "
    'may: ask /v1/kernels, or run "gemm-tuner explain".'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A trial as the page shows it; what was not timed has no times."""

    trial: Trial
    call_ns: float | None
    interval_ns: tuple[float, float] | None
    ratio: Ratio | None
    standing: Standing | None
    baseline: str
    detail: str
    source: str | None  # the digest of the kernel whose source can be shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value of m with its speed, and that of the baseline by the ratio."""

    listed: Listed
    gflop_per_s: float
    baseline_gflop_per_s: float


def chosen_place(places: Sequence[Listed]) -> Listed | None:
    """Return the place to show of those that fit a question: the first with a verdict, if any."""
    known = [place for place in places if place.standing is not None]
    return next(iter(known or places), None)


def attempts_of(service: RunningService, trials: Sequence[Trial]) -> list[Attempt]:
    """Return trials as the page shows them."""
    digests = {trial.artifact.sha256 for trial in trials if trial.artifact}
    held = service.repository.held_artifacts(digests)
    return [_attempt(trial, held) for trial in trials]


def _attempt(trial: Trial, held: Collection[str]) -> Attempt:
    measured = trial.measurement
    digest = trial.artifact.sha256 if trial.artifact else ""
    doubt = why_doubted(measured) if measured else None
    ratio = measured.ratio if measured else None
    standing = None
    if measured is not None and ratio is not None:
        standing = Standing.of(decide_by(trial), baseline=measured.baseline, doubt=doubt)
    return Attempt(
        trial=trial,
        call_ns=measured.candidate.median_ns if measured else None,
        interval_ns=measured.candidate.interval_ns if measured else None,
        ratio=ratio,
        standing=standing,
        baseline=measured.baseline if measured else "",
        detail=trial.detail or doubt or "",
        source=digest if digest in held else None,
    )


def attempts_picture(
    attempts: Sequence[Attempt], place: Listed, before: int | None
) -> Picture | None:
    """Return a plot of the ratios of what was timed in a place, on its page before a trial."""
    timed = [
        (one.trial.candidate.text, one.standing.value, one.ratio, one.baseline)
        for one in attempts
        if one.ratio is not None and one.standing is not None
    ]
    if not timed:
        return None
    names = _short_names([name for name, *_figures in timed])
    return PICTURES.ask(
        f"attempts before {before}, {_place_text(place)}",
        drawings.ratios,
        tuple((name, *figures) for name, (_whole, *figures) in zip(names, timed, strict=True)),
        f"Speed of candidates over the baseline, {place.problem.text}; "
        "the table below has the figures.",
    )


def _short_names(names: Sequence[str]) -> list[str]:
    """Return names without the words, behind the first, that all of them have."""
    words = [name.split() for name in names]
    shared = set(words[0]).intersection(*words[1:]) if len(names) > 1 else set()
    return [
        " ".join([first, *(word for word in rest if word not in shared)]) for first, *rest in words
    ]


def curve_of(listed: Sequence[Listed]) -> list[Point]:
    """Return the points of a curve over m, for exact m alone, and none for a single one."""
    points = [
        Point(
            listed=one,
            gflop_per_s=one.problem.flop(one.problem.m.high) / one.call_ns,
            baseline_gflop_per_s=one.problem.flop(one.problem.m.high) / one.call_ns / one.ratio,
        )
        for one in listed
        if one.problem.m.exact and one.call_ns and one.ratio
    ]
    return points if len(points) >= _LEAST_POINTS else []


def curve_picture(points: Sequence[Point], place: Listed) -> Picture | None:
    """Return the plot of speed over m in a place."""
    if not points:
        return None
    problem = place.problem
    named = " ".join((*problem.operation.words, problem.types.text))
    return PICTURES.ask(
        f"curve, {_place_text(place)}",
        drawings.curve,
        tuple(
            (one.listed.problem.m.high, one.gflop_per_s, one.baseline_gflop_per_s) for one in points
        ),
        f"n = {problem.columns.text}, k = {problem.k}, {named}",
        "Speed of kernels and baselines over m; the table below has the figures.",
    )


def _place_text(place: Listed) -> str:
    """Return what tells a place from all others: pictures of one are shown nowhere else."""
    return f"{place.problem.text}, {place.cpu_key}, {context_text(place.context)}"


def explain(service: RunningService, place: Listed) -> list[str]:
    """Return the sentences that tell why the answer for a place is what it is."""
    cpu = service.repository.cpu(place.cpu_key)
    if cpu is None:
        return []
    asked, now = Asked.of(place.problem, cpu, place.context), datetime.now(UTC)
    # With a quorum, what another host derived is derived again, from what decides alone.
    may_read = service.repository.quorum() > 1
    try:
        answer = service.resolver.answer_anew(asked, now, may_read_trials=may_read)
    except TrialsNeeded:
        return [_TOO_LONG]
    except InvalidProblem as error:
        return [str(error)]
    told: list[str] = json.loads(answer.content)["explain"]
    return told
