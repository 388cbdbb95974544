"""Time several callees in alternation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from gemm_tuner.bench.drivers import SampleStruct
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import Callee
from gemm_tuner.domain.measurement import Timing

# A sample during which the system took the processor away says nothing; it is taken again.
_TRIES_FOR_A_CALM_SAMPLE = 3
_MAX_CALLS_PER_SAMPLE = 1 << 20
_WARM_UP_SHARE = 8  # of the calls of a hot sample
# A call that takes this long is not worth a warm-up, and cannot expect never to be interrupted.
_LONG_CALL_NS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A callee with its own copies of the weights."""

    callee: Callee
    weights: WeightCopies
    is_cold: bool

    def sample_ns(self, calls: int, *, is_long: bool = False) -> int:
        """Return the time of `calls` calls, from a calm sample if there is one."""
        if is_long:
            return max(1, int(self._sample(calls, warm_up_calls=0).elapsed_ns))
        # Cold weights must stay cold: one call warms the activations only.
        warm_up_calls = 1 if self.is_cold else max(1, calls // _WARM_UP_SHARE)
        fewest_switches, elapsed_ns = None, 0
        for _try in range(_TRIES_FOR_A_CALM_SAMPLE):
            sample = self._sample(calls, warm_up_calls=warm_up_calls)
            switches = sample.involuntary_switches
            if fewest_switches is None or switches < fewest_switches:
                fewest_switches, elapsed_ns = switches, sample.elapsed_ns
            if fewest_switches == 0:
                break
        return max(1, elapsed_ns)

    def _sample(self, calls: int, *, warm_up_calls: int) -> SampleStruct:
        return self.callee.sample(
            self.weights.struct, warm_up_calls=warm_up_calls, timed_calls=calls
        )


def measure(
    contestants: Sequence[Contestant],
    *,
    pairs: int,
    sample_ns: int,
    on_turn: Callable[[int], None],
) -> tuple[Timing, ...]:
    """Return the timings of all contestants, sample i of each taken in the same round.

    Each round starts with the next contestant. `on_turn` is told who runs before each sample.
    """
    calls, are_long = [], []
    for index, contestant in enumerate(contestants):
        on_turn(index)
        count, elapsed_ns = _calibrate(contestant, sample_ns)
        calls.append(count)
        are_long.append(elapsed_ns >= count * _LONG_CALL_NS)
    samples: list[list[int]] = [[] for _contestant in contestants]
    for round_number in range(pairs):
        for turn in range(len(contestants)):
            index = (round_number + turn) % len(contestants)
            on_turn(index)
            taken_ns = contestants[index].sample_ns(calls[index], is_long=are_long[index])
            samples[index].append(taken_ns)
    return tuple(
        Timing(calls_per_sample=count, samples_ns=tuple(taken))
        for count, taken in zip(calls, samples, strict=True)
    )


def _calibrate(contestant: Contestant, sample_ns: int) -> tuple[int, int]:
    """Return how many calls take about `sample_ns`, and how long they took."""
    calls = 1
    while True:
        elapsed_ns = contestant.sample_ns(calls)
        if elapsed_ns >= sample_ns or calls >= _MAX_CALLS_PER_SAMPLE:
            return calls, elapsed_ns
        wanted = min(ceil(1.1 * calls * sample_ns / elapsed_ns), 16 * calls)
        calls = min(max(calls + 1, wanted), _MAX_CALLS_PER_SAMPLE)
