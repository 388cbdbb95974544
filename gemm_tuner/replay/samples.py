"""The samples of a recording: windows of them for a timing, and how fast each candidate is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Self

from gemm_tuner.bench.sample import Sample
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.measurement import Interference, Measurement, Timing
from gemm_tuner.domain.record import Stage
from gemm_tuner.replay.recording import RecordedRequest, Recording, Series

_EVERY_OTHER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A sample of a candidate and one of the baseline from the same round of a request.

    Each is the time of its number of calls. Those of the candidate count as so many times faster
    than they were by the `speed`, which is not that of what came between.
    """

    ours: Sample
    calls: int
    theirs: Sample
    baseline_calls: int
    stolen: float
    others: float
    speed: float = 1.0

    @property
    def is_calm(self) -> bool:
        """Say whether nothing came between."""
        return self.ours.is_calm and self.theirs.is_calm

    @property
    def is_disturbed(self) -> bool:
        """Say whether threads waited for a core."""
        return self.ours.is_disturbed or self.theirs.is_disturbed

    @property
    def call_ns(self) -> float:
        """Return the time of a call of the candidate, in ns."""
        return self.ours.elapsed_ns / self.calls / self.speed

    @property
    def baseline_call_ns(self) -> float:
        """Return the time of a call of the baseline, in ns."""
        return self.theirs.elapsed_ns / self.baseline_calls

    def at_speed(self, factor: float) -> Self:
        """Return the pair with so many times the speed of the candidate over the baseline."""
        return replace(self, speed=factor)


class Samples:
    """All samples of a recording, by candidate and stage, in the order in which they were taken.

    Finals of leaders, if there are any, stand for the shorter ones of these candidates: every other
    one says how fast they are, and a search draws from those between. So no search is told that it
    is right by the samples that it saw. The shorter finals of the others were taken earlier; their
    times count as if the machine had been then as it was for the leaders later.
    """

    def __init__(self, recording: Recording) -> None:
        """Sort the samples."""
        candidates = [one.candidate for one in recording.candidates]
        self._baseline = recording.baseline
        self._pairs: dict[tuple[Stage, Candidate], list[Pair]] = {}
        self._overheads: dict[Stage, list[float]] = {}
        self._visits: dict[Candidate, list[float]] = {}
        self._finals: dict[Candidate, list[float]] = {}
        of_leaders: dict[tuple[Stage, Candidate], list[Pair]] = {}
        of_leaders_so_far = 0
        for request in recording.requests:
            self._overheads.setdefault(request.stage, []).append(_overhead_s(request))
            kept, speeds = self._pairs, self._visits
            if request.of_leaders:
                kept = {} if of_leaders_so_far % _EVERY_OTHER == 0 else of_leaders
                speeds = self._finals
                of_leaders_so_far += 1
            for place, series in zip(request.candidates, request.series, strict=True):
                candidate, pairs = candidates[place], _pairs(series, request)
                kept.setdefault((request.stage, candidate), []).extend(pairs)
                if request.stage is Stage.FINAL:
                    speed = self.measurement(pairs).ratio.median
                    speeds.setdefault(candidate, []).append(speed)
        self._pairs |= of_leaders
        if of_leaders:
            change = self._change(self._speeds_in(list(self._finals_in_turn())[1::_EVERY_OTHER]))
            for stage, candidate in self._pairs.keys() - of_leaders.keys():
                if stage is Stage.FINAL:
                    pairs = self._pairs[stage, candidate]
                    self._pairs[stage, candidate] = [one.at_speed(change) for one in pairs]

    def speeds(self) -> dict[Candidate, float]:
        """Return how fast each candidate is that was right: what a search is to find out.

        It is the median of every other final of the leaders, in which they had the same rounds.
        That of any other is the median of its visits, each of which says what a sweep compares
        finals by; the leaders say how much the machine has changed since, and none is faster than
        the fastest of them.
        """
        visits = {one: median(speeds) for one, speeds in self._visits.items()}
        finals = self._speeds_in(list(self._finals_in_turn())[::_EVERY_OTHER])
        if not finals:
            return visits
        change = self._change(finals)
        most = max(finals.values())
        return {one: min(change * speed, most) for one, speed in visits.items()} | finals

    def _change(self, finals: Mapping[Candidate, float]) -> float:
        """Return by what the speeds of the leaders in some finals differ from their visits."""
        return median(speed / median(self._visits[one]) for one, speed in finals.items())

    def _finals_in_turn(self) -> Iterator[dict[Candidate, float]]:
        """Yield the speeds of the leaders in each of their finals."""
        for final in zip(*self._finals.values(), strict=True):
            yield dict(zip(self._finals, final, strict=True))

    @staticmethod
    def _speeds_in(finals: Sequence[Mapping[Candidate, float]]) -> dict[Candidate, float]:
        """Return how fast each leader is by some finals, over the median leader of each.

        They have the same rounds there, and the machine may be faster in one final than in another.
        """
        middles = [median(final.values()) for final in finals]
        middle = median(middles) if middles else 0.0
        return {
            one: middle
            * median(final[one] / own for final, own in zip(finals, middles, strict=True))
            for one in (finals[0] if finals else ())
        }

    def regrets_of_one_final(self) -> list[float]:
        """Return what is lost by whom each final of the leaders finds the fastest.

        Lost is of the best speed, by the median of the other finals: what is left of a search that
        times just the leaders, each as long as a sweep does in its final.
        """
        finals = list(self._finals_in_turn())
        if len(finals) == 1:
            return []
        regrets = []
        for place, final in enumerate(finals):
            others = self._speeds_in([*finals[:place], *finals[place + 1 :]])
            fastest = max(final, key=lambda one: final[one])
            regrets.append(1 - others[fastest] / max(others.values()))
        return regrets

    def overhead_s(self, stage: Stage) -> float:
        """Return what a request takes besides its samples, for each that takes part."""
        return median(self._overheads[stage])

    def window(self, candidate: Candidate, stage: Stage, count: int, place: float) -> list[Pair]:
        """Return so many pairs that were taken one after the other, or all that there are.

        Where a race is to have more than were recorded, they are those of finals. After the last
        pair comes the first. `place`, from 0 to 1, says where the window begins: leaders of the
        same place have the same rounds.
        """
        pairs = self._pairs[stage, candidate]
        if len(pairs) < count:
            pairs = max(pairs, self._pairs[Stage.FINAL, candidate], key=len)
        begin = int(place * len(pairs))
        return [*pairs[begin:], *pairs[:begin]][:count]

    def measurement(self, pairs: Sequence[Pair]) -> Measurement:
        """Return the measurement that pairs make: of the calm ones if they are half of all."""
        calm = [pair for pair in pairs if pair.is_calm]
        kept = calm if 2 * len(calm) >= len(pairs) else pairs
        count = len(kept)
        return Measurement(
            candidate=_timing(kept[0].calls, [pair.call_ns for pair in kept]),
            baseline=self._baseline,
            baseline_timing=_timing(
                kept[0].baseline_calls, [pair.baseline_call_ns for pair in kept]
            ),
            interference=Interference(
                disturbed_rounds=sum(pair.is_disturbed for pair in kept) / count,
                stolen=sum(pair.stolen for pair in kept) / count,
                others=sum(pair.others for pair in kept) / count,
            ),
        )


def _timing(calls: int, call_ns: Sequence[float]) -> Timing:
    """Return the timing of calls that took so long in each sample."""
    return Timing(
        calls_per_sample=calls,
        samples_ns=tuple(max(1, round(calls * one_ns)) for one_ns in call_ns),
    )


def _pairs(series: Series, request: RecordedRequest) -> list[Pair]:
    return [
        Pair(
            ours=ours,
            calls=series.calls,
            theirs=theirs,
            baseline_calls=request.baseline.calls,
            stolen=request.stolen,
            others=request.others,
        )
        for ours, theirs in zip(series.samples, request.baseline.samples, strict=True)
    ]


def _overhead_s(request: RecordedRequest) -> float:
    """Return what a request took besides its samples, in seconds for each that took part."""
    series = (*request.series, request.baseline)
    sampled_s = sum(sum(one.elapsed_ns) for one in series) / 1e9
    return max(0.0, request.wall_s - sampled_s) / len(series)
