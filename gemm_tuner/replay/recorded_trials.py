"""Trials from a recording, with a clock that goes on by what each step took at that time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from heapq import heappop, heappush

import numpy as np

from gemm_tuner.bench.requests import Baselines
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.measurement import Measurement, of_several_processes
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.replay.recording import Recording
from gemm_tuner.replay.samples import Samples
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.strategy import BATCH

_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
# As in bench/measure.py: what is clearly slower than the fastest has a third of the samples.
_BEHIND_FASTEST = 1.1
_SHARE_OF_ALL = 3
_LEAST_ROUNDS = 2


@dataclass(slots=True)
class Clock:
    """A clock that stands still unless it is told to go on."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now_s


@dataclass(slots=True, kw_only=True)
class RecordedHost:
    """What candidates were timed beside when they were recorded."""

    text: str
    call_s: float
    provers: int

    def baselines(self, _regime: Regime) -> Baselines:
        """Return the baseline, which is known by its name and time alone."""
        return Baselines(
            texts=(self.text,),
            implementations={},
            raced=(),
            product_only=frozenset(),
            left_out={},
            call_s=self.call_s,
        )


class RecordedTrials:
    """Stands for a machine: a `TrialSource` whose trials were recorded there.

    Compilers and proofs run side by side, as many as then. `timed` keeps what each timing said of
    speeds, with the time of its end. The `dice` say which samples a timing has.
    """

    def __init__(
        self,
        recording: Recording,
        samples: Samples,
        space: RecordedSpace,
        *,
        clock: Clock,
        dice: np.random.Generator,
    ) -> None:
        """Prepare, as a sweep does: its first candidates are compiled meanwhile."""
        self._recording = recording
        self._samples = samples
        self._problem, self._cpu = space.problem, space.cpu
        self._clock = clock
        self._dice = dice
        self._recorded = {one.candidate: one for one in recording.candidates}
        self._compiled: set[Candidate] = set()
        self._proven: set[Candidate] = set()
        self._failed: dict[Candidate, Trial] = {}
        self.timed: list[tuple[float, dict[Candidate, float]]] = []
        self.host = RecordedHost(
            text=recording.baseline,
            call_s=recording.baseline_call_s,
            provers=recording.provers,
        )
        self._prepare(shortlist(space, BATCH))

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Return the trials of the candidates that failed."""
        return tuple(self._failed.values())

    @property
    def tried(self) -> int:
        """Return how many candidates were tried."""
        return len(self._proven) + len(self._failed)

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Compile the new ones of some candidates, all together."""
        new = [one for one in candidates if one not in self._compiled]
        ends = ends_side_by_side(
            [self._recorded[one].compile_s for one in new], self._recording.builders
        )
        self._clock.now_s += max(ends, default=0.0)
        self._compiled.update(new)

    def prove(self, candidates: Sequence[Candidate], context: ExecutionContext) -> list[Candidate]:
        """Return the candidates that were right, in their order."""
        self.compile(candidates)
        new = [one for one in candidates if one not in self._proven and one not in self._failed]
        ends = ends_side_by_side(
            [self._recorded[one].prove_s for one in new], self._recording.provers
        )
        self._clock.now_s += max(ends, default=0.0)
        for candidate in new:
            outcome = self._recorded[candidate].outcome
            if outcome is Outcome.CORRECT:
                self._proven.add(candidate)
            else:
                trial = self._trial(candidate, context, Stage.RACE)
                detail = self._recorded[candidate].detail
                self._failed[candidate] = replace(trial, outcome=outcome, detail=detail)
        return [one for one in candidates if one in self._proven]

    def time(
        self,
        candidates: Sequence[Candidate],
        context: ExecutionContext,
        *,
        stage: Stage,
        pairs: int,
        sample_ns: int,
        processes: int = 1,
        on_process: Callable[[int], None] = lambda _process: None,
    ) -> list[Trial]:
        """Return the timings of candidates that were right, by samples that were recorded."""
        of_each: list[list[Measurement]] = []
        for process in range(processes):
            on_process(process)
            of_each.append(self._time_together(candidates, stage, pairs, sample_ns))
        _middle, together = of_several_processes(of_each)
        measured = dict(zip(candidates, together, strict=True))
        self.timed.append(
            (self._clock(), {one: found.comparable_speed for one, found in measured.items()})
        )
        return [
            replace(self._trial(one, context, stage), measurement=found)
            for one, found in measured.items()
        ]

    def _time_together(
        self, candidates: Sequence[Candidate], stage: Stage, pairs: int, sample_ns: int
    ) -> list[Measurement]:
        recorded = Stage.RACE if stage is Stage.RACE else Stage.FINAL
        place = self._dice.random()
        windows = {one: self._samples.window(one, recorded, pairs, place) for one in candidates}
        first = first_rounds(pairs)
        least_ns = {
            one: min(pair.call_ns for pair in window[:first]) for one, window in windows.items()
        }
        fastest_ns = min(least_ns.values())
        rounds = {
            one: first if is_behind(least_ns[one], fastest_ns) else pairs for one in candidates
        }
        self._clock.now_s += (len(candidates) + 1) * self._samples.overhead_s(recorded)
        for one, window in windows.items():
            self._clock.now_s += (1 + rounds[one]) * _sample_s(window[0].call_ns, sample_ns)
        baseline_ns = next(iter(windows.values()))[0].baseline_call_ns
        self._clock.now_s += (1 + pairs) * _sample_s(baseline_ns, sample_ns)
        return [self._samples.measurement(window[: rounds[one]]) for one, window in windows.items()]

    def _prepare(self, first: Sequence[Candidate]) -> None:
        """Compile what a sweep would while its host prepares; no more of that begins after it."""
        prepare_s = self._recording.prepare_s
        durations_s = [self._recorded[one].compile_s for one in first]
        ends_s = ends_side_by_side(durations_s, self._recording.builders)
        begun = [
            (one, end_s)
            for one, end_s, took_s in zip(first, ends_s, durations_s, strict=True)
            if end_s - took_s < prepare_s
        ]
        self._compiled.update(one for one, _end_s in begun)
        self._clock.now_s += max([prepare_s, *(end_s for _one, end_s in begun)])

    def _trial(self, candidate: Candidate, context: ExecutionContext, stage: Stage) -> Trial:
        text = candidate.text.encode()
        return Trial(
            created_at=_BEGIN + timedelta(seconds=self._clock()),
            problem=self._problem,
            cpu=self._cpu,
            context=context,
            candidate=candidate,
            toolchain=self._recording.toolchain,
            generator=self._recording.generator,
            stage=stage,
            outcome=Outcome.CORRECT,
            artifact=Artifact(
                sha256=sha256(text).hexdigest(),
                size_bytes=len(text),
                abi_version=self._problem.operation.abi_version,
                required_isa=self._cpu.isa,
                toolchain=self._recording.toolchain,
                source_sha256=sha256(text).hexdigest(),
            ),
            usable_cpus=self._recording.threads,
        )


def first_rounds(pairs: int) -> int:
    """Return how many rounds all candidates take part in, of so many."""
    return max(_LEAST_ROUNDS, pairs // _SHARE_OF_ALL)


def is_behind(call_ns: float, fastest_ns: float) -> bool:
    """Return whether a candidate takes part in no more than the first rounds."""
    return call_ns > _BEHIND_FASTEST * fastest_ns


def ends_side_by_side(durations_s: Sequence[float], workers: int) -> list[float]:
    """Return when each task ends, in seconds, if the next free one of some workers takes it."""
    free_s = [0.0] * workers
    ends_s = []
    for duration_s in durations_s:
        end_s = heappop(free_s) + duration_s
        ends_s.append(end_s)
        heappush(free_s, end_s)
    return ends_s


def _sample_s(call_ns: float, sample_ns: int) -> float:
    return max(call_ns, sample_ns) / 1e9
