"""What a round of timings may say of itself: a kernel can write it too."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from gemm_tuner.bench.build_round import BuildRound
from gemm_tuner.bench.measure import TimedRounds
from gemm_tuner.bench.sample import Sample
from gemm_tuner.domain.measurement import Timing

SAMPLE = Sample(elapsed_ns=100, involuntary_switches=0, waited_ns=0)
TIMING = Timing(calls_per_sample=1, samples_ns=(100, 101))
ROUNDS = TimedRounds(timings=(TIMING,) * 5, samples=((SAMPLE,) * 2,) * 5)
# Two builds, two baselines, and a loop.
ROUND = BuildRound(
    rounds=ROUNDS,
    builds=2,
    baselines=(2, 3),
    peak_flop_per_s=1e11,
    roofline=None,
    use=None,
    least_ns=50.0,
    plain_ns={1: 90.0},
    epilogue_ns=10.0,
)


def test_a_round_of_what_was_asked_for_has_no_fault() -> None:
    assert ROUND.fault_for(2, 2) == ""


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"builds": 5}, "5 builds"),
        ({"builds": -1}, "-1 builds"),
        ({"rounds": replace(ROUNDS, samples=ROUNDS.samples[1:])}, "4 lists of samples"),
        ({"rounds": replace(ROUNDS, samples=((), *ROUNDS.samples[1:]))}, "5 lists of samples"),
        (
            {"rounds": replace(ROUNDS, timings=(replace(TIMING, samples_ns=(10**400,)),) * 5)},
            "cannot be",
        ),
        (
            {"rounds": replace(ROUNDS, timings=(replace(TIMING, calls_per_sample=10**400),) * 5)},
            "cannot be",
        ),
        ({"baselines": ()}, "baselines in the turns ()"),
        ({"baselines": (2, 7)}, "baselines in the turns (2, 7)"),
        ({"baselines": (2, -1)}, "baselines in the turns (2, -1)"),
        ({"baselines": (0, 3)}, "baselines in the turns (0, 3)"),  # a build beside itself
        ({"least_ns": nan}, "cannot be"),
        ({"least_ns": 0.0}, "cannot be"),
        ({"least_ns": -1.0}, "cannot be"),
        ({"epilogue_ns": inf}, "cannot be"),
        ({"plain_ns": {1: -inf}}, "cannot be"),
        ({"plain_ns": {2: 1.0}}, "times of the products of [2]"),
        ({"peak_flop_per_s": nan}, "cannot be"),
        ({"peak_flop_per_s": 0.0}, "cannot be"),
    ],
)
def test_a_round_that_cannot_be_has_a_fault(changed: dict[str, Any], word: str) -> None:
    assert word in replace(ROUND, **changed).fault_for(2, 2)
