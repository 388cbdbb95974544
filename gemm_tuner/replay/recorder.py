"""Record a problem: build, prove and time each candidate of its grid, and keep every sample."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from statistics import median
from time import monotonic
from typing import TypeVar

import numpy as np

from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.sample import Sample
from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import (
    CompilationFailed,
    NotEnoughMemory,
    PreparationStopped,
    TrialFailed,
)
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.replay.grid import MOST, beside, favourites, others
from gemm_tuner.replay.recording import RecordedCandidate, RecordedRequest, Recording, Series
from gemm_tuner.replay.standing import recipes_digest
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.wire.record import WireCpu
from gemm_tuner.strategies.strategy import BATCH
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.host import start_host
from gemm_tuner.tuning.race import find_race
from gemm_tuner.tuning.sampling import FINAL, RACE, Sampling
from gemm_tuner.tuning.settings import SweepSettings

VISITS = 2
_FINAL = replace(FINAL, pairs=11)
# What is nearly as fast as the fastest of all visits takes part in as many finals, in the same
# rounds, each in a process of its own: at least so many candidates and at most so many.
_NEARLY_AS_FAST = 0.96
_LEAST_LEADERS, _MOST_LEADERS = BATCH, 3 * BATCH
_FINALS_OF_LEADERS = 9
# Calls that are slow have as few samples as in a sweep of this budget.
_BUDGET_S = 10.0
_STEPS_TO_PREPARE = 20  # it takes about as long as so many builds, proofs or timings

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A candidate, and what became of it so far; times in seconds.

    `speeds` are those of its visits in a context.
    """

    candidate: Candidate
    build: Build | None = None
    finding: Finding
    compile_s: float
    prove_s: float = 0.0
    speeds: list[float] = field(default_factory=list)

    @property
    def is_correct(self) -> bool:
        """Say whether it may be timed."""
        return self.finding.outcome is Outcome.CORRECT


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Records one problem on this machine, in contexts that differ in the regime alone.

    The same candidates are recorded in all contexts, at most so many: those of the contexts that
    are `done` already, if there are any. Each is timed in so many `visits`, each time beside
    others. `report` is told what is done, and of each step that is over. When `is_stopped`, nothing
    new is begun.
    """

    problem: Problem
    contexts: Sequence[ExecutionContext]
    cpu: Cpu
    settings: SweepSettings
    report: Callable[[str, int], None]
    is_stopped: Callable[[], bool]
    most: int = MOST
    visits: int = VISITS
    done: Mapping[ExecutionContext, Recording] = field(default_factory=dict)
    _spaces: list[Space] = field(init=False)
    _first: list[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        """Choose the first candidates.

        Raises:
            NoKernelFamily: no family covers the problem on this CPU.
        """
        self._spaces = [
            Space(
                problem=self.problem, cpu=self.cpu, threads=context.threads, regime=context.regime
            )
            for context in self.contexts
        ]
        recorded = chain.from_iterable(one.candidates for one in self.done.values())
        before = list(dict.fromkeys(one.candidate for one in recorded))
        self._first = before or favourites(self._spaces, self.most)

    @property
    def steps(self) -> int:
        """Return how many steps there are: a build and a proof of each candidate, and timings."""
        count = len(self._first) if self.done else self.most
        looks = 0 if self.done else 1
        timings = (looks + self.visits) * count + _FINALS_OF_LEADERS * min(_LEAST_LEADERS, count)
        return _STEPS_TO_PREPARE + 2 * count + timings * len(self._left)

    @property
    def _left(self) -> list[ExecutionContext]:
        return [context for context in self.contexts if context not in self.done]

    def run(self) -> Iterator[Recording]:
        """Yield what was recorded in each context, when it is whole.

        Raises:
            PreparationStopped: it `is_stopped`.
            GemmTunerError: nothing can be built, proved or timed here.
        """
        space = Space(problem=self.problem, cpu=self.cpu, threads=self.contexts[0].threads)
        self.report("preparing", 0)
        begin_s = monotonic()
        with start_host(
            self.problem,
            space,
            self.settings,
            provers=min(BATCH, usable_cpus()),
            races=[find_race([], self.settings, context=context) for context in self._left],
            is_stopped=self.is_stopped,
        ) as host:
            prepare_s = monotonic() - begin_s
            self.report("preparing", _STEPS_TO_PREPARE)
            entries = self._entries(host)
            recipes = recipes_digest(
                self.problem, [one.candidate for one in entries], self.settings.toolchain
            )
            for context in self._left:
                requests = tuple(self._time(entries, host, context))
                if not any(entry.is_correct for entry in entries):
                    raise TrialFailed(
                        f"no candidate of {self.problem.text} is right here: "
                        f"{entries[0].finding.detail}"
                    )
                yield Recording(
                    recorded_at=datetime.now(UTC),
                    cpu=WireCpu.of(self.cpu),
                    toolchain=self.settings.toolchain.text,
                    generator=generator_version(),
                    recipes=recipes,
                    problem=self.problem.text,
                    threads=context.threads,
                    regime=context.regime,
                    baseline=host.baselines(context.regime).text,
                    baseline_call_s=host.baselines(context.regime).call_s,
                    builders=usable_cpus(),
                    provers=host.provers,
                    prepare_s=prepare_s,
                    candidates=tuple(map(self._recorded, entries)),
                    requests=tuple(_of_correct(request, entries) for request in requests),
                )

    def _entries(self, host: TrialHost) -> list[_Entry]:
        """Return all candidates, built and proved.

        After the first, those one step from the fastest of each context, again and again; where
        there are none, other first choices of tiles.
        """
        entries = self._made(self._first, host)
        speeds: dict[ExecutionContext, dict[Candidate, float]] = {one: {} for one in self._left}
        expanded: set[Candidate] = set()
        looked = 0
        while not self.done and (room := self.most - len(entries)) > 0:
            for context in self._left:
                speeds[context] |= self._look(entries[looked:], host, context)
            looked = len(entries)
            centres = _fastest_of_each(speeds.values(), without=expanded)
            expanded.update(centres)
            known = [one.candidate for one in entries]
            if centres:
                new = beside(self._spaces[0], centres, known, room)
            elif not (new := others(self._spaces, known, room)):
                break
            entries += self._made(new, host)
        return entries

    def _made(self, candidates: Sequence[Candidate], host: TrialHost) -> list[_Entry]:
        entries = self._at_once("building", self._build, candidates, usable_cpus())
        return self._at_once(
            "proving", lambda entry: self._prove(entry, host), entries, host.provers
        )

    def _look(
        self, entries: Sequence[_Entry], host: TrialHost, context: ExecutionContext
    ) -> dict[Candidate, float]:
        """Return about how fast those entries are that are correct."""
        speeds: dict[Candidate, float] = {}
        for start in range(0, len(entries), BATCH):
            self._check()
            batch = entries[start : start + BATCH]
            found = self._findings(batch, range(len(batch)), host, context, _FINAL)
            for place, one in found.items():
                if one.measurement is not None:
                    speeds[batch[place].candidate] = one.measurement.comparable_speed
            self.report(f"looking for the fastest, {context.regime.value}", len(batch))
        return speeds

    def _at_once(
        self, stage: str, task: Callable[[Given], Made], given: Sequence[Given], workers: int
    ) -> list[Made]:
        """Return what a task makes of each of those given; so many run at the same time."""

        def go_on(one: Given) -> Made:
            self._check()
            return task(one)

        made = []
        with ThreadPoolExecutor(max_workers=workers) as executor:
            for one in executor.map(go_on, given):
                made.append(one)
                self.report(stage, 1)
        return made

    def _check(self) -> None:
        if self.is_stopped():
            raise PreparationStopped(f"{self.problem.text} is not recorded to its end.")

    def _build(self, candidate: Candidate) -> _Entry:
        family = family_named(candidate.micro_kernel.family)
        source = self.settings.render(self.problem, candidate, family)
        begin_s = monotonic()
        build, finding = None, Finding(outcome=Outcome.CORRECT)
        try:
            build = compile_kernel(
                source, isa=family.isa, toolchain=self.settings.toolchain, is_afresh=True
            )
        except CompilationFailed as error:
            finding = Finding(outcome=Outcome.COMPILE_FAILED, detail=str(error))
        return _Entry(
            candidate=candidate, build=build, finding=finding, compile_s=monotonic() - begin_s
        )

    def _prove(self, entry: _Entry, host: TrialHost) -> _Entry:
        if entry.build is None:
            return entry
        begin_s = monotonic()
        finding = host.verify(entry.build)
        return replace(entry, finding=finding, prove_s=monotonic() - begin_s)

    def _time(
        self, entries: Sequence[_Entry], host: TrialHost, context: ExecutionContext
    ) -> Iterator[RecordedRequest]:
        """Yield the requests of a context.

        In each visit, batches have other candidates, as in a search. Then come finals of the
        fastest. A candidate that fails becomes an entry with that outcome.
        """
        first_s = monotonic()
        for entry in entries:
            entry.speeds.clear()
        for visit in range(self.visits):
            correct = [place for place, entry in enumerate(entries) if entry.is_correct]
            np.random.default_rng(visit).shuffle(correct)
            for start in range(0, len(correct), BATCH):
                batch = correct[start : start + BATCH]
                yield from self._requests(
                    entries, batch, host, context, sampling=RACE, first_s=first_s
                )
                yield from self._requests(
                    entries, batch, host, context, sampling=_FINAL, first_s=first_s, is_visit=True
                )
                self.report(f"timing, {context.regime.value}", len(batch))
            self.report(f"timing, {context.regime.value}", len(entries) - len(correct))
        leaders = _leaders(entries)
        for final in range(_FINALS_OF_LEADERS):
            requests = self._requests(
                entries, leaders, host, context, sampling=_FINAL, first_s=first_s, process=final
            )
            if len(requests) == 1:  # or else they did not fit into memory together
                yield requests[0].model_copy(update={"of_leaders": True})
            steps = min(len(leaders), _LEAST_LEADERS)
            self.report(f"timing the fastest, {context.regime.value}", steps)

    def _requests(
        self,
        entries: Sequence[_Entry],
        places: Sequence[int],
        host: TrialHost,
        context: ExecutionContext,
        *,
        sampling: Sampling,
        first_s: float,
        is_visit: bool = False,
        process: int = 0,
    ) -> list[RecordedRequest]:
        """Return the requests to time the entries in these places; the first of all began then.

        Leaders are chosen by what each `is_visit` tells.
        """
        self._check()
        begin_s = monotonic()
        found = self._findings(entries, places, host, context, sampling, process=process)
        for place, one in found.items():
            if is_visit and one.measurement is not None:
                entries[place].speeds.append(one.measurement.ratio.median)
        wall_s = monotonic() - begin_s
        return list(
            _requests_of(found, sampling=sampling, begin_s=begin_s - first_s, wall_s=wall_s)
        )

    def _findings(
        self,
        entries: Sequence[_Entry],
        batch: Sequence[int],
        host: TrialHost,
        context: ExecutionContext,
        sampling: Sampling,
        *,
        process: int = 0,
    ) -> dict[int, TimedFinding]:
        """Return what was found of the entries in these places that are correct so far."""
        builds = {
            place: build
            for place in batch
            if entries[place].is_correct and (build := entries[place].build)
        }
        if not builds:
            return {}
        timed = host.time_together(
            list(builds.values()),
            context=context,
            pairs=sampling.affordable_pairs(
                len(builds),
                call_s=host.baselines(context.regime).call_s,
                budget_s=_BUDGET_S,
            ),
            sample_ns=sampling.sample_ns,
            process=process,
            keeps_all=True,
        )
        found = dict(zip(builds, timed, strict=True))
        for place, one in found.items():
            entries[place].finding = one.finding
            if one.samples is None and entries[place].is_correct:
                raise NotEnoughMemory(
                    f"{entries[place].candidate.text} is not timed: {one.finding.detail}"
                )
        return found

    def _recorded(self, entry: _Entry) -> RecordedCandidate:
        family = family_named(entry.candidate.micro_kernel.family)
        return RecordedCandidate(
            text=entry.candidate.text,
            outcome=entry.finding.outcome,
            detail=entry.finding.detail,
            compile_s=entry.compile_s,
            prove_s=entry.prove_s,
            cycles=predict_cycles(self.problem, entry.candidate, family, self.cpu),
        )


def _fastest_of_each(
    speeds: Iterable[Mapping[Candidate, float]], *, without: Container[Candidate]
) -> list[Candidate]:
    """Return the fastest of each context that is not among those `without` which it is to be."""
    found: dict[Candidate, None] = {}
    for of_context in speeds:
        left = [one for one in of_context if one not in without]
        if left:
            found[max(left, key=lambda one: of_context[one])] = None
    return list(found)


def _leaders(entries: Sequence[_Entry]) -> list[int]:
    """Return the places of the correct entries that may be the fastest."""
    speeds = {
        place: median(entry.speeds) for place, entry in enumerate(entries) if entry.is_correct
    }
    order = sorted(speeds, key=lambda place: -speeds[place])[:_MOST_LEADERS]
    near = [place for place in order if speeds[place] >= _NEARLY_AS_FAST * speeds[order[0]]]
    return order[: max(len(near), _LEAST_LEADERS)]


def _requests_of(
    found: Mapping[int, TimedFinding], *, sampling: Sampling, begin_s: float, wall_s: float
) -> Iterator[RecordedRequest]:
    """Yield the requests that candidates in these places took part in.

    It is one, unless they did not fit into memory together: then each was timed beside the baseline
    alone.
    """
    together: dict[tuple[Sample, ...], list[int]] = {}
    for place, one in found.items():
        if one.samples is not None:
            together.setdefault(one.samples[1], []).append(place)
    for places in together.values():
        measured = [timed for place in places if (timed := found[place].measurement)]
        samples = [taken for place in places if (taken := found[place].samples)]
        interference = measured[0].interference
        yield RecordedRequest(
            stage=sampling.stage,
            sample_ns=sampling.sample_ns,
            begin_s=begin_s,
            wall_s=wall_s / len(together),
            stolen=interference.stolen if interference else 0.0,
            others=interference.others if interference else 0.0,
            candidates=tuple(places),
            series=tuple(
                Series.of(one.candidate.calls_per_sample, ours)
                for one, (ours, _theirs) in zip(measured, samples, strict=True)
            ),
            baseline=Series.of(measured[0].baseline_timing.calls_per_sample, samples[0][1]),
        )


def _of_correct(request: RecordedRequest, entries: Sequence[_Entry]) -> RecordedRequest:
    """Return a request without the samples of candidates that failed later."""
    kept = [
        (place, series)
        for place, series in zip(request.candidates, request.series, strict=True)
        if entries[place].is_correct
    ]
    return request.model_copy(
        update={
            "candidates": tuple(place for place, _series in kept),
            "series": tuple(series for _place, series in kept),
        }
    )
