"""Which formats of packed weights several m of one layer share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest
from samples import CONTEXT, CPU, PROBLEM, add_build, make_trial

from gemm_tuner.domain.candidate import UpTo
from gemm_tuner.domain.layer_problems import layer_problems
from gemm_tuner.domain.measurement import Measurement, Ratio, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.select.shared_weights import LIBRARY, Sharing, fewest_formats, loss_beside, share
from gemm_tuner.store.repository import Repository


def with_m(m: int) -> Problem:
    return replace(PROBLEM, m=Rows(low=m, high=m))


def keep(repository: Repository, m: int, call_ns_by_nr: Mapping[int, int]) -> None:
    """Store confirmed kernels for m rows, by the width of their panels, beside 1000 ns."""
    for nr, call_ns in call_ns_by_nr.items():
        artifact = add_build(repository, f"{m} {nr}".encode())
        repository.add_trial(
            make_trial(problem=with_m(m), nr=nr, call_ns=call_ns, artifact=artifact)
        )


def shared(repository: Repository, *rows: int, max_loss: float = 0.02) -> Sharing:
    problems = [with_m(m) for m in rows]
    return share(repository, problems, cpu=CPU, context=CONTEXT, max_loss=max_loss)


def formats_of(sharing: Sharing) -> list[str]:
    return [one.chosen.packed_format.removeprefix("f32 3072x768 ") for one in sharing.kernels]


@pytest.mark.parametrize(
    ("best_ns", "formats"),
    [(981, ["panels nr48 kc256"] * 2), (979, ["panels nr48 kc256", "panels nr32 kc256"])],
)
def test_a_format_is_shared_where_it_costs_at_most_the_bound(
    best_ns: int, formats: list[str], repository: Repository
) -> None:
    keep(repository, 1, {48: 500})
    keep(repository, 128, {32: best_ns, 48: 1000})

    sharing = shared(repository, 1, 128)

    assert formats_of(sharing) == formats
    assert sharing.kernels[0].chosen.verdict.basis is Basis.MEASURED
    last = sharing.kernels[1]
    assert last.best.verdict.candidate == make_trial(nr=32).candidate
    if len(sharing.formats) == 1:
        assert last.chosen.verdict.basis is Basis.SHARED
        assert last.chosen.verdict.artifact is not None
        assert last.chosen.loss == pytest.approx(1 - best_ns / 1000)


def test_two_formats_serve_what_one_cannot(repository: Repository) -> None:
    keep(repository, 1, {16: 500})
    keep(repository, 16, {32: 500, 48: 505})
    keep(repository, 128, {64: 500, 48: 505})

    sharing = shared(repository, 1, 16, 128)

    assert formats_of(sharing) == [f"panels nr{nr} kc256" for nr in (16, 48, 48)]
    assert len(sharing.best_formats) == 3


def test_of_equally_few_formats_the_one_that_costs_least_is_shared(repository: Repository) -> None:
    keep(repository, 1, {48: 500, 32: 508, 64: 504})
    keep(repository, 128, {32: 500, 64: 503, 48: 509})

    assert shared(repository, 1, 128).formats == ("f32 3072x768 panels nr64 kc256",)


def test_a_kernel_a_little_slower_than_the_baseline_saves_its_copy(repository: Repository) -> None:
    keep(repository, 1, {48: 500})
    keep(repository, 128, {48: 1015})

    chosen = shared(repository, 1, 128).kernels[1].chosen

    assert chosen.packed_format.endswith("nr48 kc256")
    assert chosen.verdict.artifact is not None
    assert chosen.verdict.decision is Decision.TIE


def test_what_is_much_slower_than_the_baseline_is_left_to_it(repository: Repository) -> None:
    keep(repository, 1, {48: 500})
    keep(repository, 128, {48: 1030})

    sharing = shared(repository, 1, 128)

    assert formats_of(sharing)[1] == LIBRARY
    assert sharing.kernels[1].chosen.verdict.artifact is None
    assert "left to the baseline" in sharing.kernels[1].explain[-1]


def test_rows_are_a_list() -> None:
    with pytest.raises(InvalidSetting, match=r"m is '1..8'; give a list, \['1..8'\]"):
        layer_problems(17, 33, m="1..8", dtype="f32", epilogue="none", w_layout="nk", max_loss=0.02)


def test_one_kernel_takes_no_place_of_several_for_a_range(repository: Repository) -> None:
    keep(repository, 1, {48: 500})
    problem = replace(PROBLEM, m=Rows(low=2, high=64))
    one, wide = (make_trial(problem=problem, nr=nr, call_ns=500) for nr in (48, 32))
    several = replace(wide.candidate, below=(UpTo(rows=8, kernel=wide.candidate),))
    for trial in (one, replace(wide, candidate=several)):
        artifact = add_build(repository, trial.candidate.text.encode())
        repository.add_trial(replace(trial, artifact=artifact))

    sharing = share(repository, [with_m(1), problem], cpu=CPU, context=CONTEXT)

    assert formats_of(sharing) == ["panels nr48 kc256", "panels nr32 kc256"]
    assert sharing.kernels[1].chosen.verdict.candidate == several


def test_what_is_not_tuned_is_left_to_the_baseline(repository: Repository) -> None:
    keep(repository, 1, {48: 500})

    sharing = shared(repository, 1, 128)

    assert formats_of(sharing)[1] == LIBRARY
    assert sharing.kernels[1].chosen.verdict.basis is Basis.NONE


def test_a_difference_inside_the_interval_counts_if_the_fastest_samples_show_it() -> None:
    best = Ratio(median=1.2, low=1.1, high=1.3, of_minimums=1.2)

    assert loss_beside(best, Ratio(median=1.11, low=1.0, high=1.2, of_minimums=1.21)) == 0.0
    assert loss_beside(best, Ratio(median=1.11, low=1.0, high=1.2, of_minimums=1.14)) > 0.04
    assert loss_beside(best, Ratio(median=1.08, low=1.0, high=1.1, of_minimums=1.3)) > 0.09


def test_a_noisy_kernel_is_compared_by_its_fastest_samples(repository: Repository) -> None:
    keep(repository, 1, {48: 500})
    keep(repository, 128, {32: 900})
    samples = (9000,) * 4 + (10_000,) * 8
    noisy = Measurement(
        candidate=Timing(calls_per_sample=10, samples_ns=samples),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=10, samples_ns=(10_000,) * 12),
    )
    artifact = add_build(repository, b"noisy")
    repository.add_trial(make_trial(problem=with_m(128), measurement=noisy, artifact=artifact))

    sharing = shared(repository, 1, 128)

    assert formats_of(sharing) == ["panels nr48 kc256"] * 2


@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_formats_are_those_of_an_exhaustive_search(seed: int) -> None:
    random = np.random.default_rng(seed)
    losses = [
        {f"f{name}": float(random.integers(8)) for name in range(6) if random.random() < 0.4}
        or {"f0": 0.0}
        for _problem in range(5)
    ]

    def cost(formats: Sequence[str]) -> tuple[int, float]:
        total = sum(min(one.get(name, inf) for name in formats) for one in losses)
        return (len(formats) if total < inf else 100, total)

    names = [f"f{name}" for name in range(6)]
    everything = [chosen for count in range(1, 6) for chosen in combinations(names, count)]
    assert cost(fewest_formats(losses)) == min(map(cost, everything))


@pytest.mark.parametrize(
    ("problems", "max_loss", "fault"),
    [
        ([with_m(1), replace(PROBLEM, k=64)], 0.02, "differ in m alone"),
        ([with_m(m) for m in range(17)], 0.02, "17 values of m"),
        ([], 0.02, "0 values of m"),
        ([with_m(1)], 2.0, "loss 2.0"),
    ],
)
def test_what_cannot_share_is_refused(
    problems: list[Problem], max_loss: float, fault: str, repository: Repository
) -> None:
    with pytest.raises(InvalidSetting, match=fault):
        share(repository, problems, cpu=CPU, context=CONTEXT, max_loss=max_loss)
