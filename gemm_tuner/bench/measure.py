"""Time several runners in alternation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter_ns

from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.sample import Sample
from gemm_tuner.bench.workload import Runner
from gemm_tuner.domain.measurement import Timing

# A sample during which the system took the processor away says nothing; it is taken again. So does
# one whose threads waited for a core.
_TRIES_FOR_A_CALM_SAMPLE = 3
_MAX_CALLS_PER_SAMPLE = 1 << 20
_WARM_UP_SHARE = 8  # of the calls of a hot sample
# Calls that go on for this long have read all that they read several times.
_ENOUGH_WARM_UP_NS = 10_000_000
# A sample that takes this long cannot expect never to be interrupted, however often it is taken.
_LONG_SAMPLE_NS = 10_000_000
# A call that takes this long is not worth a warm-up.
_LONG_CALL_NS = 20_000_000
# One whose samples take so many times as long as those of the first is timed in few rounds: its
# ratio is far from 1 anyhow.
_SLOW_OVER_FIRST = 3
_ROUNDS_OF_SLOW = 11
# A candidate that is this much slower than the fastest is not timed any longer once this share of
# the rounds is over: a neighbour that disturbs two rounds of a final must not decide it.
_BEHIND_FASTEST = 1.1
_SHARE_OF_ALL = 3
_LEAST_ROUNDS_OF_ALL = 2
# Idle threads of OpenMP spin for up to 0.5 ms here (bench/isolate.py), then sleep.
SETTLING_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A runner with its own copies of the weights.

    Before a sample there are at least `least_warm_up_calls` hot calls, fewer of long ones, and they
    go on for at least `warm_up_ns`. What has too few copies to be cold is made so by `push_out`
    before each sample, which then reads no copy twice.
    """

    runner: Runner
    weights: WeightCopies
    is_cold: bool
    warm_up_ns: int = 0
    least_warm_up_calls: int = 1
    push_out: Callable[[], None] | None = None

    @property
    def most_calls(self) -> int:
        """Return how many calls a sample may have, after one that warms up."""
        if self.push_out is None:
            return _MAX_CALLS_PER_SAMPLE
        return max(1, self.weights.count - 1)

    def warm_up_calls(self, calls: int, elapsed_ns: int) -> int:
        """Return how many calls stand before a sample of `calls`, which takes `elapsed_ns`."""
        if self.is_cold:
            return 1  # cold weights must stay cold: one call warms the activations only
        settling = ceil(calls * self.warm_up_ns / elapsed_ns)
        enough = ceil(calls * _ENOUGH_WARM_UP_NS / elapsed_ns)
        return max(min(self.least_warm_up_calls, enough), calls // _WARM_UP_SHARE, settling)

    def sample(self, calls: int, *, warm_up_calls: int, wait_ns: Callable[[], int]) -> Sample:
        """Return the time of `calls` calls, from a calm sample if there is one.

        There is one try if it takes long; before another, one call warms up what was warm.
        """
        calmest = self._sample(calls, warm_up_calls, wait_ns)
        for _retry in range(_TRIES_FOR_A_CALM_SAMPLE - 1):
            if calmest.is_calm or calmest.elapsed_ns >= _LONG_SAMPLE_NS:
                break
            calmest = min(calmest, self._sample(calls, 1, wait_ns), key=Sample.unrest)
        return calmest

    def _sample(self, calls: int, warm_up_calls: int, wait_ns: Callable[[], int]) -> Sample:
        if self.push_out is not None:
            self.push_out()
        waited_before_ns = wait_ns()
        sample = self.runner.sample(
            self.weights.struct, warm_up_calls=warm_up_calls, timed_calls=calls
        )
        return Sample(
            elapsed_ns=max(1, int(sample.elapsed_ns)),
            involuntary_switches=int(sample.involuntary_switches),
            # A thread that has ended takes its time with it.
            waited_ns=max(0, wait_ns() - waited_before_ns),
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """One sample of each contestant that took part."""

    samples: dict[int, Sample]

    @property
    def is_calm(self) -> bool:
        """Say whether all samples were calm."""
        return all(sample.is_calm for sample in self.samples.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRounds:
    """The timing of each contestant, and its samples; sample i of each is from the same round."""

    timings: tuple[Timing, ...]
    samples: tuple[tuple[Sample, ...], ...]

    def disturbed_share(self, one: int, other: int) -> float:
        """Return the share of the rounds of both in which one or the other was disturbed."""
        pairs = list(zip(self.samples[one], self.samples[other], strict=False))
        return sum(any(sample.is_disturbed for sample in pair) for pair in pairs) / len(pairs)


def measure(
    contestants: Sequence[Contestant],
    *,
    pairs: int,
    sample_ns: int,
    on_turn: Callable[[int], None],
    settling_ns: int = 0,
    candidates: int = 1,
    wait_ns: Callable[[], int] = lambda: 0,
    keeps_all: bool = False,
) -> TimedRounds:
    """Return the timings of all contestants, sample i of each taken in the same round.

    There are `pairs` samples of each, or at least half as many where rounds were interrupted. The
    first `candidates` contestants are candidates: those clearly slower than the fastest have only
    a third of the samples. Any other whose samples take much longer has few, too. Calls that
    take long are not warmed up; those up to three times as long as of the fastest candidate are
    treated as its are. `on_turn` is told who runs before each sample, and then nothing is done
    for `settling_ns`, so that threads of the one before come to rest. `wait_ns` tells how long
    threads of this process have waited for a core so far. With `keeps_all`, nobody has fewer
    samples, and those of interrupted rounds are kept.
    """
    calls, elapsed_ns = [], []
    for index, contestant in enumerate(contestants):
        on_turn(index)
        count, sample_takes_ns = _calibrate(contestant, sample_ns, wait_ns)
        calls.append(count)
        elapsed_ns.append(sample_takes_ns)
    call_ns = [takes_ns / count for count, takes_ns in zip(calls, elapsed_ns, strict=True)]
    fastest_ns = min(call_ns[:candidates])
    warm_ups = [
        0 if _is_long(takes_ns / count, fastest_ns) else contestant.warm_up_calls(count, takes_ns)
        for contestant, count, takes_ns in zip(contestants, calls, elapsed_ns, strict=True)
    ]
    slow_ns = _SLOW_OVER_FIRST * max(sample_ns, min(elapsed_ns[:candidates]))
    rounds_of_all = max(_LEAST_ROUNDS_OF_ALL, pairs // _SHARE_OF_ALL)

    def stays(index: int, number: int) -> bool:
        if keeps_all:
            return True
        if index >= candidates:
            return number < _ROUNDS_OF_SLOW or elapsed_ns[index] <= slow_ns
        is_behind = call_ns[index] > _BEHIND_FASTEST * min(call_ns[:candidates])
        return number != rounds_of_all or not is_behind

    def run_round(number: int, participants: Sequence[int]) -> _Round:
        samples = {}
        for turn in turn_order(number, len(participants)):
            index = participants[turn]
            on_turn(index)
            _wait(settling_ns)
            samples[index] = contestants[index].sample(
                calls[index], warm_up_calls=warm_ups[index], wait_ns=wait_ns
            )
            call_ns[index] = min(call_ns[index], samples[index].elapsed_ns / calls[index])
        return _Round(samples)

    def chosen(rounds: Sequence[_Round]) -> Sequence[_Round]:
        return rounds if keeps_all else _without_interrupted(rounds)

    present = list(range(len(contestants)))
    kept: list[_Round] = []
    of_present: list[_Round] = []
    for number in range(pairs):
        staying = [index for index in present if stays(index, number)]
        if staying != present:
            kept += chosen(of_present)
            present, of_present = staying, []
        of_present.append(run_round(number, present))
    kept += chosen(of_present)
    samples_of = [
        [one.samples[index] for one in kept if index in one.samples]
        for index in range(len(contestants))
    ]
    return TimedRounds(
        timings=tuple(
            Timing(calls_per_sample=count, samples_ns=tuple(one.elapsed_ns for one in samples))
            for count, samples in zip(calls, samples_of, strict=True)
        ),
        samples=tuple(map(tuple, samples_of)),
    )


def _is_long(call_ns: float, fastest_ns: float) -> bool:
    """Return whether a call is too long to warm up; the fastest candidate's takes `fastest_ns`."""
    is_comparable = call_ns <= _SLOW_OVER_FIRST * fastest_ns
    return (fastest_ns if is_comparable else call_ns) >= _LONG_CALL_NS


def _wait(nanoseconds: int) -> None:
    """Keep this core busy for a while: it should not fall asleep while others do."""
    end_ns = perf_counter_ns() + nanoseconds
    while perf_counter_ns() < end_ns:
        pass


def turn_order(round_number: int, count: int) -> tuple[int, ...]:
    """Return who runs in a round, first to last; the last contestant is always last.

    The others start with the next one in every second round, and run backwards in the rounds
    between, so that nobody always runs after the same one.
    """
    others = count - 1
    order = [(round_number // 2 + turn) % others for turn in range(others)]
    if round_number % 2:
        order.reverse()
    return (*order, others)


def _without_interrupted(rounds: Sequence[_Round]) -> Sequence[_Round]:
    """Return the calm rounds if they are at least half of all, else all."""
    calm = [one for one in rounds if one.is_calm]
    return calm if 2 * len(calm) >= len(rounds) else rounds


def _calibrate(
    contestant: Contestant, sample_ns: int, wait_ns: Callable[[], int]
) -> tuple[int, int]:
    """Return how many calls take about `sample_ns`, and how long they took.

    What takes long is tried once more before it is believed: the first call of a library may
    generate code, and any call may be interrupted.
    """

    def least_ns(calls: int, *, warm_up_calls: int, enough_ns: int) -> int:
        elapsed_ns = [
            contestant.sample(calls, warm_up_calls=warm_up_calls, wait_ns=wait_ns).elapsed_ns
        ]
        if elapsed_ns[0] >= enough_ns:
            again = contestant.sample(calls, warm_up_calls=0, wait_ns=wait_ns)
            elapsed_ns.append(again.elapsed_ns)
        return min(elapsed_ns)

    first_ns = least_ns(1, warm_up_calls=0, enough_ns=_LONG_CALL_NS)
    if first_ns >= _LONG_CALL_NS:
        return 1, first_ns
    calls = 1
    while True:
        elapsed_ns = least_ns(calls, warm_up_calls=1, enough_ns=sample_ns)
        if elapsed_ns >= sample_ns or calls >= contestant.most_calls:
            return calls, elapsed_ns
        wanted = min(ceil(1.1 * calls * sample_ns / elapsed_ns), 16 * calls)
        calls = min(max(calls + 1, wanted), contestant.most_calls)
