"""Which searches a range of m gets, and which format its kernels share, by recorded speeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from samples import CONTEXT, CPU, make_trial

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.ranges.boundaries import Shape
from gemm_tuner.tuning.ranges.formats import same_tile_in_format, timed_formats
from gemm_tuner.tuning.ranges.range_budget import Budgets, budget_of_each
from gemm_tuner.tuning.ranges.range_search import RangeSearch
from gemm_tuner.tuning.settings import SweepSettings

ROWS = (1, 8, 64)
BUDGET = Budgets(budget_s=48.0)
NARROW, MIDDLE, WIDE = (
    Candidate.parse(f"avx512_f32_1x{nr} mc64_nc768_kc768 jc_ic_jr_ir") for nr in (16, 32, 48)
)
SETTINGS = SweepSettings(
    budget_s=48.0, toolchain=Toolchain(name="gcc", version="12.2.0 -O3", command=("gcc",))
)

# The speeds of the best kernel of each format at an m, in the place of what a sweep would find.
Speeds = Callable[[Candidate, int], float]


@dataclass(slots=True)
class Sweeps:
    """Sweeps that find planted speeds.

    `asked` has the m, the format and the seconds of each search, `tried` the m and the format of
    each sweep that tries a few chosen kernels, and these.
    """

    repository: Repository
    alone: Mapping[int, Candidate]
    speed: Speeds
    asked: list[tuple[int, int, float]] = field(default_factory=list)
    tried: dict[tuple[int, int], Sequence[Candidate]] = field(default_factory=dict)
    seeds: dict[tuple[int, int], Sequence[Candidate]] = field(default_factory=dict)

    def __call__(
        self,
        problem: Problem,
        *,
        settings: SweepSettings,
        like: Candidate | None = None,
        seeds: Sequence[Candidate] = (),
        chosen: Sequence[Candidate] = (),
        **_others: object,
    ) -> tuple[SimpleNamespace]:
        m, best = problem.m.high, like or self.alone[problem.m.high]
        assert settings.tries_all_chosen is bool(chosen)
        if chosen:
            self.tried[m, best.micro_kernel.nr] = chosen
        else:
            self.asked.append((m, like.micro_kernel.nr if like else 0, settings.budget_s))
            self.seeds[m, best.micro_kernel.nr] = seeds
        minute = len(self.asked) + len(self.tried)
        self.repository.add_trial(_trial(problem, best, self.speed(best, m), minute=minute))
        return (SimpleNamespace(verdict=SimpleNamespace(candidate=best)),)


def _trial(problem: Problem, candidate: Candidate, speed: float, **changes: int) -> Trial:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(round(100_000 / speed),) * 12),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(100_000,) * 12),
    )
    return replace(
        make_trial(**changes),
        problem=problem,
        candidate=candidate,
        measurement=measurement,
        generator=generator_version(),
    )


@pytest.fixture
def repository(store_url: str) -> Repository:
    """Return a store of one kind: what is searched does not depend on the kind."""
    return Repository(open_database(store_url))


@pytest.fixture
def begin(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RangeSearch, Sweeps]]:
    """Return what begins a search whose sweeps find planted speeds."""

    def begin(alone: Mapping[int, Candidate], speed: Speeds) -> tuple[RangeSearch, Sweeps]:
        sweeps = Sweeps(repository, alone, speed)
        monkeypatch.setattr("gemm_tuner.tuning.ranges.range_search.sweep", sweeps)
        monkeypatch.setattr("gemm_tuner.tuning.earlier.stands", lambda _trial, _toolchain: True)
        search = RangeSearch(
            problem=Problem.parse("f32 1..64x768x768"),
            context=CONTEXT,
            cpu=CPU,
            repository=repository,
            settings=SETTINGS,
            on_progress=lambda _step: None,
            is_stopped=lambda: False,
        )
        search.tune_alone(ROWS)
        return search, sweeps

    return begin


def test_those_that_lose_by_the_format_share_the_time_of_the_others(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    def speed(candidate: Candidate, m: int) -> float:
        if candidate.micro_kernel.nr == WIDE.micro_kernel.nr:
            return 1.9 if m == 1 else 2.0
        return 2.0 if m == 1 else 1.5

    search, sweeps = begin({1: NARROW, 8: WIDE, 64: WIDE}, speed)

    search.explore_formats(ROWS)
    _wanted, like = search.best_format()
    del sweeps.asked[:]
    search.search_format(like)
    search.search_format(like)

    assert like.micro_kernel.nr == WIDE.micro_kernel.nr
    # That a kernel in this format was confirmed at m = 1 is not the end of the search in it.
    assert sweeps.asked == [(1, WIDE.micro_kernel.nr, 3 * 12.0)]
    # It begins with what is best at the nearest m, with a block for its own rows.
    assert sweeps.seeds[1, WIDE.micro_kernel.nr][0] == Shape.of(WIDE, 8).at(1)


def test_few_kernels_of_each_m_are_tried_in_a_format_and_first_those_of_other_m(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    def speed(candidate: Candidate, m: int) -> float:
        return 1.5 if (candidate.micro_kernel.nr, m) == (NARROW.micro_kernel.nr, 64) else 2.0

    search, sweeps = begin({1: NARROW, 8: WIDE, 64: WIDE}, speed)

    search.explore_formats(ROWS)

    # An m at which a kernel in the format was confirmed before has no need of it.
    assert {m for m, nr in sweeps.tried if nr == NARROW.micro_kernel.nr} == {8, 64}
    assert {m for m, nr in sweeps.tried if nr == WIDE.micro_kernel.nr} == {1}
    assert all(1 <= len(chosen) <= 4 for chosen in sweeps.tried.values())
    assert sweeps.tried[8, NARROW.micro_kernel.nr][0] == Shape.of(NARROW, 1).at(8)


def test_formats_are_explored_until_the_most_promising_one_was(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    search, sweeps = begin({1: NARROW, 8: WIDE, 64: WIDE}, lambda _candidate, _m: 2.0)

    search.explore_formats(ROWS)

    # What costs nothing anywhere cannot be beaten by what was not tried.
    assert {nr for _m, nr in sweeps.tried} == {NARROW.micro_kernel.nr}
    assert len(search.explored) == 1


def test_an_m_that_is_measured_later_is_tried_in_the_formats_of_the_others(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    def speed(candidate: Candidate, m: int) -> float:
        losing = {(NARROW.micro_kernel.nr, 24), (WIDE.micro_kernel.nr, 1)}
        return 1.5 if (candidate.micro_kernel.nr, m) in losing else 2.0

    search, sweeps = begin({1: NARROW, 8: WIDE, 24: WIDE, 64: WIDE}, speed)
    search.explore_formats(ROWS)
    assert search.best_format()[1].micro_kernel.nr == NARROW.micro_kernel.nr

    search.tune_alone([24])
    search.explore_formats([24])

    assert (24, NARROW.micro_kernel.nr) in sweeps.tried
    assert (1, WIDE.micro_kernel.nr) in sweeps.tried  # which promises more now


def test_the_tile_that_won_an_m_is_tried_in_a_format_that_it_can_read(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    flat = Candidate.parse("avx512_f32_1x48 mc1_nc768_kc384 jc_ic_jr_ir")
    search, sweeps = begin({1: flat, 8: NARROW, 64: NARROW}, lambda _candidate, _m: 2.0)

    search.explore_formats(ROWS)

    # Blocks are as deep as those of the format, and three of its panels lie side by side.
    in_format = "avx512_f32_1x48 mc1_nc768_kc768 jc_ic_jr_ir ws3"
    assert sweeps.tried[1, NARROW.micro_kernel.nr][0].text == in_format
    tall = Candidate.parse("avx512_f32_8x16 mc64_nc768_kc384 jc_ic_jr_ir pack_x")
    (found,) = same_tile_in_format(tall, replace(search.space(64), like=NARROW))
    assert found.text == "avx512_f32_8x16 mc64_nc768_kc768 jc_ic_jr_ir pack_x"
    # Tiles of 16 columns cannot read panels of 48.
    assert same_tile_in_format(tall, replace(search.space(64), like=flat)) == ()


def test_a_search_for_shared_weights_begins_with_the_fastest_tile_and_not_the_last(
    begin: Callable[..., tuple[RangeSearch, Sweeps]], repository: Repository
) -> None:
    tall, low = (
        Candidate.parse(f"avx512_f32_{mr}x16 mc64_nc768_kc384 jc_ic_jr_ir") for mr in (8, 4)
    )
    search, _sweeps = begin(dict.fromkeys(ROWS, NARROW), lambda _candidate, _m: 1.0)
    space = search.space(64)
    for minute, (candidate, speed) in enumerate(((tall, 2.0), (low, 1.5)), start=60):
        repository.add_trial(_trial(space.problem, candidate, speed, minute=minute))

    timed = timed_formats(space, CONTEXT, repository, SETTINGS.toolchain)

    (found,) = timed.same_tile(replace(space, like=NARROW))
    assert found.text == "avx512_f32_8x16 mc64_nc768_kc768 jc_ic_jr_ir"


def test_a_format_that_loses_much_at_one_m_does_not_win_by_a_little_at_the_others(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    def speed(candidate: Candidate, m: int) -> float:
        if candidate.micro_kernel.nr == NARROW.micro_kernel.nr:
            return 2.0 if m == 1 else 1.98
        return 1.34 if m == 1 else 2.0  # a loss of 33 %

    search, _sweeps = begin({1: NARROW, 8: WIDE, 64: WIDE}, speed)

    search.explore_formats(ROWS)
    (_family, packed), like = search.best_format()

    assert "nr16" in packed
    assert like.micro_kernel.nr == NARROW.micro_kernel.nr


def test_what_a_race_shows_decides_no_format(
    begin: Callable[..., tuple[RangeSearch, Sweeps]], repository: Repository
) -> None:
    search, _sweeps = begin(dict.fromkeys(ROWS, WIDE), lambda _candidate, _m: 2.0)
    for m in ROWS:
        lucky = _trial(search.space(m).problem, MIDDLE, 3.0, minute=60)
        repository.add_trial(replace(lucky, stage=Stage.RACE))

    _wanted, like = search.best_format()

    assert like.micro_kernel.nr == WIDE.micro_kernel.nr


def test_a_sweep_beside_another_library_that_was_stopped_ends_no_search(
    begin: Callable[..., tuple[RangeSearch, Sweeps]], repository: Repository
) -> None:
    search, _sweeps = begin(dict.fromkeys(ROWS, WIDE), lambda _candidate, _m: 2.0)
    raced = replace(_trial(search.space(8).problem, MIDDLE, 3.0, minute=60), stage=Stage.RACE)
    assert raced.measurement
    other = replace(raced.measurement, baseline="scalar")
    repository.add_trial(replace(raced, measurement=other))

    _wanted, like = search.best_format()

    assert like.micro_kernel.nr == WIDE.micro_kernel.nr


def test_the_steps_of_an_m_take_its_time_and_no_more() -> None:
    for rows, losing in ((10, 10), (10, 3), (10, 1), (3, 2), (3, 0)):
        searching_s = losing * BUDGET.in_format_s(rows, losing)
        in_all_s = rows * (BUDGET.alone_s + 3 * BUDGET.explored_s) + searching_s
        assert in_all_s <= rows * 48.0 * (1 + 1e-9)
    assert BUDGET.in_format_s(10, 10) == 12.0
    assert BUDGET.in_format_s(10, 1) == 48.0


def test_kernels_are_compared_by_what_was_timed_last(
    begin: Callable[..., tuple[RangeSearch, Sweeps]], repository: Repository
) -> None:
    search, _sweeps = begin(dict.fromkeys(ROWS, WIDE), lambda _candidate, _m: 2.4)
    other = replace(WIDE, blocking=replace(WIDE.blocking, k_unroll=4))
    for candidate, speed in ((WIDE, 2.0), (other, 2.2)):  # in the same rounds
        trial = _trial(search.space(8).problem, candidate, speed, minute=60)
        repository.add_trial(replace(trial, stage=Stage.FINAL))

    wanted, _like = search.best_format()
    speeds = search.in_format(8, wanted)

    assert speeds[WIDE] < speeds[other]


def test_an_m_is_compared_with_the_best_that_any_search_found(
    begin: Callable[..., tuple[RangeSearch, Sweeps]],
) -> None:
    def speed(candidate: Candidate, m: int) -> float:
        if candidate == NARROW and m == 1:
            return 1.5
        return 2.5 if (m, candidate) == (8, WIDE) else 2.0

    search, _sweeps = begin({1: WIDE, 8: NARROW, 64: WIDE}, speed)
    search.explore_formats(ROWS)
    search.renew_alone()

    assert search.alone[8] == WIDE


@pytest.mark.parametrize(
    ("m", "budget_s", "each_s"),
    [
        ("1..512", 220.0, 10.0),  # eleven m first, and as much time for what follows
        ("1..512", 219.0, None),
        ("17..64", 60.0, 10.0),
        ("1..512", 3300.0, 150.0),
        ("8", 3600.0, None),
        ("0..1", 3600.0, None),
    ],
)
def test_a_range_is_split_where_the_time_suffices(
    m: str, budget_s: float, each_s: float | None
) -> None:
    assert budget_of_each(Problem.parse(f"f32 {m}x8x8"), budget_s) == each_s
