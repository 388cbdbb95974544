from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.measure import Contestant, TimedRounds, measure, turn_order
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.domain.measurement import Timing


class Clock:
    """Stands for a runner: its calls take a given time, and some samples are interrupted."""

    packs_each_copy = False
    packed_weight_bytes = 0

    def __init__(self, call_ns: int, switches: Callable[[int], int] = lambda _sample: 0) -> None:
        self.call_ns = call_ns
        self.switches = switches
        self.warm_ups: list[int] = []

    def pack(self, address: int) -> None:
        """Do nothing: there are no weights."""

    def sample(
        self, _weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return a sample of the given time."""
        switches = self.switches(len(self.warm_ups))
        self.warm_ups.append(warm_up_calls)
        return SampleStruct(self.call_ns * timed_calls + 1000 * switches, switches)


def measured(
    clocks: Iterable[Clock],
    pairs: int,
    *,
    is_cold: bool = False,
    warm_up_ns: int = 0,
    least_warm_up_calls: int = 1,
    candidates: int = 1,
) -> tuple[Timing, ...]:
    contestants = [
        Contestant(
            runner=clock,
            weights=WeightCopies(clock, 1, seed=0),
            is_cold=is_cold,
            warm_up_ns=warm_up_ns,
            least_warm_up_calls=least_warm_up_calls,
        )
        for clock in clocks
    ]
    return timed_rounds(contestants, pairs, candidates).timings


def timed_rounds(
    contestants: Sequence[Contestant],
    pairs: int,
    candidates: int = 1,
    wait_ns: Callable[[], int] = lambda: 0,
    *,
    keeps_all: bool = False,
) -> TimedRounds:
    return measure(
        contestants,
        pairs=pairs,
        sample_ns=1000,
        on_turn=lambda _index: None,
        candidates=candidates,
        wait_ns=wait_ns,
        keeps_all=keeps_all,
    )


@pytest.mark.parametrize("count", [3, 4, 6])
def test_every_contestant_runs_after_several_others_and_the_last_stays_last(count: int) -> None:
    orders = [turn_order(number, count) for number in range(4 * count)]

    assert all(sorted(order) == list(range(count)) for order in orders)
    assert {order[-1] for order in orders} == {count - 1}
    pairs = [pair for order in orders for pair in pairwise(order[:-1])]
    for first, second in {tuple(sorted(pair)) for pair in pairs}:
        assert pairs.count((first, second)) == pairs.count((second, first))


@pytest.mark.parametrize(("first_ns", "warm_up_calls"), [(21_000_000, 0), (19_000_000, 1)])
def test_what_is_compared_is_warmed_up_as_the_first_is(first_ns: int, warm_up_calls: int) -> None:
    first, other = Clock(first_ns), Clock(40_000_000 - first_ns)

    measured([first, other, Clock(100)], pairs=4)

    assert first.warm_ups[-4:] == [warm_up_calls] * 4
    assert other.warm_ups[-4:] == [warm_up_calls] * 4


def test_a_long_candidate_does_not_take_the_warm_up_from_fast_ones() -> None:
    long, fast, baseline = Clock(60_000_000), Clock(1_000_000), Clock(1_000_000)

    measured([long, fast, baseline, Clock(100)], pairs=4, candidates=2)

    assert long.warm_ups[-2:] == [0] * 2
    assert fast.warm_ups[-4:] == [1] * 4
    assert baseline.warm_ups[-4:] == [1] * 4


def test_what_has_few_copies_is_made_cold_before_each_sample_and_reads_none_twice() -> None:
    clock, pushed = Clock(10), list[int]()
    contestant = Contestant(
        runner=clock,
        weights=WeightCopies(clock, 8, seed=0),
        is_cold=True,
        push_out=lambda: pushed.append(len(clock.warm_ups)),
    )

    timing, *_others = timed_rounds([contestant, *cold_clocks()], pairs=4).timings

    assert timing.calls_per_sample == 7  # and one before them
    assert pushed == list(range(len(clock.warm_ups)))


def cold_clocks() -> list[Contestant]:
    return [
        Contestant(runner=clock, weights=WeightCopies(clock, 1, seed=0), is_cold=True)
        for clock in (Clock(10), Clock(10))
    ]


def test_slow_contestant_has_the_first_samples_only() -> None:
    first, slow, lasting = Clock(1000), Clock(5_000), Clock(100)

    timings = measured([first, slow, lasting], pairs=20)

    assert [len(timing.samples_ns) for timing in timings] == [20, 11, 20]


@pytest.mark.parametrize(("pairs", "of_slow"), [(3, 2), (5, 2), (31, 10)])
def test_candidates_clearly_behind_the_fastest_have_the_first_samples_only(
    pairs: int, of_slow: int
) -> None:
    clocks = [Clock(1200), Clock(1050), Clock(1000), Clock(1500), Clock(100)]

    timings = measured(clocks, pairs=pairs, candidates=3)

    assert [len(timing.samples_ns) for timing in timings] == [of_slow, *4 * [pairs]]


def test_a_final_is_not_decided_by_two_disturbed_rounds() -> None:
    # Calibration takes three samples; each that is interrupted is taken three times.
    hindered = Clock(1000, lambda sample: 1 if sample < 15 else 0)

    timings = measured([hindered, Clock(1000), Clock(100), Clock(100)], pairs=15, candidates=2)

    assert [len(timing.samples_ns) for timing in timings] == 4 * [13]


def test_a_candidate_that_was_interrupted_once_is_not_behind() -> None:
    # The first two samples calibrate, the third one is slow.
    hindered = Clock(30_000_000, lambda sample: 20_000 if sample == 2 else 0)

    timings = measured([hindered, Clock(30_000_000), Clock(100), Clock(100)], pairs=5, candidates=2)

    assert [len(timing.samples_ns) for timing in timings] == [4, 4, 4, 4]


def test_contestant_that_is_slow_for_a_call_only_is_timed_in_every_round() -> None:
    timings = measured([Clock(100), Clock(1_000), Clock(100)], pairs=20)

    assert [len(timing.samples_ns) for timing in timings] == [20, 20, 20]


def test_warm_up_lasts_until_the_caches_have_settled() -> None:
    slow, fast = Clock(500), Clock(100)

    measured([slow, fast], pairs=4, warm_up_ns=10_000)

    assert slow.warm_ups[-4:] == [20] * 4
    assert fast.warm_ups[-4:] == [100] * 4


def test_cold_weights_are_not_warmed() -> None:
    clock = Clock(10)

    measured([clock, Clock(10)], pairs=4, is_cold=True, warm_up_ns=10_000)

    assert max(clock.warm_ups) == 1


def test_interrupted_rounds_are_dropped_for_all() -> None:
    # The first sample calibrates; then every fourth round is interrupted in each of its tries.
    long = Clock(30_000_000, lambda sample: int(sample > 0 and sample % 4 == 0))

    timings = measured([long, Clock(100), Clock(100)], pairs=8)

    assert [len(timing.samples_ns) for timing in timings] == [6, 6, 6]
    assert set(timings[0].samples_ns) == {30_000_000}


def test_a_recording_keeps_each_sample_of_each_with_what_came_between() -> None:
    # Calibration takes two samples; the third round is interrupted in all three tries.
    hindered = Clock(1000, lambda sample: 2 if 5 <= sample < 8 else 0)
    clocks = [hindered, Clock(3000), Clock(1000), Clock(100)]
    contestants = [
        Contestant(runner=clock, weights=WeightCopies(clock, 1, seed=0), is_cold=False)
        for clock in clocks
    ]

    rounds = timed_rounds(contestants, 9, candidates=2, keeps_all=True)

    assert [len(samples) for samples in rounds.samples] == 4 * [9]
    assert [len(timing.samples_ns) for timing in rounds.timings] == 4 * [9]
    assert sum(one.involuntary_switches == 2 for one in rounds.samples[0]) == 1
    assert all(one.is_calm for one in rounds.samples[1])


def test_rounds_are_kept_when_most_are_interrupted() -> None:
    timings = measured([Clock(1000, lambda _sample: 1), Clock(100), Clock(100)], pairs=8)

    assert [len(timing.samples_ns) for timing in timings] == [8, 8, 8]


def test_calm_try_replaces_an_interrupted_one() -> None:
    timings = measured([Clock(1000, lambda sample: sample % 2), Clock(100), Clock(100)], pairs=8)

    assert set(timings[0].samples_ns) == {1000 * timings[0].calls_per_sample}
    assert len(timings[0].samples_ns) == 8


def test_another_try_is_warmed_up_by_one_call() -> None:
    interrupted = Clock(100, lambda _sample: 1)

    measured([interrupted, Clock(100), Clock(100)], pairs=4, warm_up_ns=10_000)

    assert interrupted.warm_ups[-3:] == [10, 1, 1]


def test_long_calls_are_warmed_up_by_fewer() -> None:
    clocks = [Clock(1_000_000), Clock(4_000_000), Clock(15_000_000), Clock(100)]

    measured(clocks, pairs=4, least_warm_up_calls=4)

    assert [clock.warm_ups[-1] for clock in clocks] == [4, 3, 1, 4]


def test_a_long_sample_is_taken_once() -> None:
    interrupted = Clock(15_000_000, lambda _sample: 1)

    timings = measured([interrupted, Clock(100), Clock(100)], pairs=4)

    assert len(interrupted.warm_ups) == 3 + len(timings[0].samples_ns)


@pytest.mark.parametrize("slow_sample", [0, 1])
def test_one_slow_call_does_not_make_samples_of_single_calls(slow_sample: int) -> None:
    """The first call of a library may generate code for 30 ms; any call may be interrupted."""
    library = Clock(100, lambda sample: 30_000 if sample == slow_sample else 0)

    timings = measured([library, Clock(100), Clock(100)], pairs=4)

    assert [timing.calls_per_sample for timing in timings] == 3 * [timings[1].calls_per_sample]
    assert min(library.warm_ups[-4:]) > 0


class Waits:
    """Stands for the scheduler: says that threads waited for so long in each sample."""

    def __init__(self, clock: Clock, waited_ns: Callable[[int], int]) -> None:
        self._clock = clock
        self._waited_ns = waited_ns

    def __call__(self) -> int:
        return sum(self._waited_ns(sample) for sample in range(len(self._clock.warm_ups)))


def disturbed_share(waited_ns: Callable[[int], int], *, call_ns: int = 3_000_000) -> float:
    clock = Clock(call_ns)
    contestants = [
        Contestant(runner=one, weights=WeightCopies(one, 1, seed=0), is_cold=False)
        for one in (clock, Clock(call_ns), Clock(100))
    ]
    rounds = timed_rounds(contestants, pairs=20, wait_ns=Waits(clock, waited_ns))
    return rounds.disturbed_share(0, 1)


def test_rounds_in_which_threads_waited_for_a_core_are_told() -> None:
    assert disturbed_share(lambda _sample: 1_000_000) == 1.0
    assert disturbed_share(lambda _sample: 0) == 0.0


def test_to_be_woken_is_no_disturbance() -> None:
    assert disturbed_share(lambda _sample: 150_000, call_ns=400_000) == 0.0


def test_of_long_samples_a_small_part_may_be_waited_for() -> None:
    assert disturbed_share(lambda _sample: 5_000_000, call_ns=155_000_000) == 0.0
    assert disturbed_share(lambda _sample: 50_000_000, call_ns=155_000_000) == 1.0


def test_a_few_disturbed_rounds_are_left_out() -> None:
    # A sample is taken three times where threads waited; of long ones there is one try.
    assert disturbed_share(lambda sample: 5_000_000 if sample % 4 else 0, call_ns=15_000_000) > 0.5
    assert disturbed_share(lambda sample: 0 if sample % 4 else 5_000_000, call_ns=15_000_000) == 0.0
