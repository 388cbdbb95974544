import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gemm_tuner.bench import baselines
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Materials, Row
from gemm_tuner.bench.baselines.choose import Check, Choice, Race, baseline_rows, choose_baselines
from gemm_tuner.bench.baselines.learn import Checked, check_baseline, least_time_s
from gemm_tuner.bench.baselines.onednn import OneDnn
from gemm_tuner.bench.correctness import Case
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct, build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import Runner, Workload, make_workload
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing, TrialFailed
from gemm_tuner.libraries.onednn import find_onednn, load_library
from gemm_tuner.machine.detect import detect_cpu


class Library(AnyBaseline):
    """A baseline that does nothing."""

    fuses_epilogue = True

    def __init__(self, text: str) -> None:
        self.text = text
        self.settled: object = None

    def settle(self, choice: object) -> None:
        """Remember the choice."""
        self.settled = choice

    def prepare(self, workload: Workload) -> Runner:
        """Not called."""
        raise NotImplementedError


def _row(name: str, *texts: str, missing: str = "", start_s: float = 0.0) -> Row:
    def find(_materials: Materials) -> Sequence[Copy]:
        if missing:
            raise BaselineMissing(missing)
        return [
            Copy(package=f"package {text}", baseline=Library(text), start_s=start_s)
            for text in texts
        ]

    return Row(
        name=name,
        place=0,
        find=find,
        is_raced=name != "scalar",
        is_last_resort=name == "scalar",
    )


NO_GOMP = "libgomp.so.1: cannot open shared object file"
ROWS = (
    _row("onednn", missing=NO_GOMP),
    _row("openblas", "openblas 2"),
    _row("scalar", "3"),
)


def _choose(
    names: Sequence[str], rows: Sequence[Row], check: Check, race: Race | None = None
) -> Choice:
    materials: Materials = None  # type: ignore[assignment] # these rows read none
    return choose_baselines(names, rows, lambda row: row.find(materials), check, race)


def _times(**times_s: float) -> Check:
    """Return a check by which each library takes its time, or the next one if there are more."""
    return lambda baseline: _checked(baseline.text, times_s[baseline.text.replace(" ", "_")])


def _checked(text: str, call_s: float = 0.5) -> Checked:
    return Checked(
        text=text, implementation="", call_s=call_s, choice={text: "the best"}, is_quiet=False
    )


def _check(baseline: object) -> Checked | str:
    assert isinstance(baseline, Library)
    return "y is wrong" if baseline.text == "openblas 2" else _checked(baseline.text, 0.25)


def test_choice_says_why_others_were_left_out() -> None:
    choice = _choose(["auto"], ROWS, _check)

    assert [found.text for found in choice.baselines] == ["3"]
    assert choice.baselines[0].call_s == 0.25
    assert choice.left_out == {"onednn": NO_GOMP, "openblas": "package openblas 2: y is wrong"}


def test_the_fastest_of_all_copies_of_all_libraries_is_the_baseline() -> None:
    rows = (_row("onednn", "one 3.2", "one 3.13"), _row("openblas", "open"), ROWS[2])
    check = _times(**{"one_3.2": 0.5, "one_3.13": 0.3, "open": 0.7})

    choice = _choose(["auto"], rows, check)

    assert [found.text for found in choice.baselines] == ["one 3.13"]
    baseline = choice.baselines[0].baseline
    assert isinstance(baseline, Library)
    assert baseline.settled == {"one 3.13": "the best"}
    assert choice.left_out == {}
    assert [(one.package, one.baseline, one.call_ns) for one in choice.raced] == [
        ("package one 3.13", "one 3.13", 0.3e9),
        ("package one 3.2", "one 3.2", 0.5e9),
        ("package open", "open", 0.7e9),
    ]


def test_close_libraries_run_once_more() -> None:
    rows = (_row("onednn", "one"), _row("openblas", "open"), _row("mkl", "mkl"))
    heats = {"one": [0.50, 0.50], "open": [0.55, 0.45], "mkl": [0.9]}

    choice = _choose(
        ["auto"], rows, lambda baseline: _checked(baseline.text, heats[baseline.text].pop(0))
    )

    assert choice.baselines[0].text == "open"
    assert heats == {"one": [], "open": [], "mkl": []}


@pytest.mark.parametrize(
    ("threads", "one_s", "open_s", "runs"),
    [
        (1, 0.5, 0.6, 1),
        (1, 0.5, 0.51, 2),
        (2, 0.5, 0.6, 2),
        (1, 100e-6, 120e-6, 2),
        (1, 100e-6, 130e-6, 1),
        (2, 100e-6, 130e-6, 2),
        (2, 100e-6, 160e-6, 1),
    ],
)
def test_libraries_run_once_more_only_where_that_may_tell_another_winner(
    threads: int, one_s: float, open_s: float, runs: int
) -> None:
    """Of one thread the time on a core counts, so that little more is clear."""
    rows = (_row("onednn", "one"), _row("openblas", "open"))
    checked: list[str] = []

    def check(baseline: object) -> Checked:
        assert isinstance(baseline, Library)
        checked.append(baseline.text)
        return _checked(baseline.text, {"one": one_s, "open": open_s}[baseline.text])

    _choose(["auto"], rows, check, Race(threads=threads))

    assert checked == ["one", "open"] * runs


def test_a_library_that_crashes_is_left_out_of_the_race() -> None:
    rows = (_row("onednn", "one 3.2", "one 3.13"), ROWS[2])

    def check(baseline: object) -> Checked | str:
        assert isinstance(baseline, Library)
        return "ended by SIGILL" if baseline.text == "one 3.13" else _checked(baseline.text)

    choice = _choose(["auto"], rows, check)

    assert choice.baselines[0].text == "one 3.2"
    assert choice.left_out == {"onednn": "package one 3.13: ended by SIGILL"}
    assert choice.raced[-1] == Raced(
        package="package one 3.13", baseline="", call_ns=0.0, reason="ended by SIGILL"
    )


def test_a_library_that_takes_long_to_load_is_not_raced_in_a_short_time() -> None:
    rows = (_row("onednn", "one"), _row("slow", "slow", start_s=1.0))
    check = _times(one=0.5, slow=0.1)

    quick = _choose(["auto"], rows, check, Race(limit_s=0.3))
    patient = _choose(["auto"], rows, check, Race(limit_s=3.0))

    assert quick.baselines[0].text == "one"
    assert [one.lacked_time for one in quick.raced] == [False, True]
    assert quick.raced[1].reason.startswith("takes up to 1 s to start, and the race of this budget")
    assert patient.baselines[0].text == "slow"
    assert not any(one.lacked_time for one in patient.raced)


def test_a_library_that_lacked_time_is_raced_as_soon_as_there_is_time() -> None:
    rows = (_row("onednn", "one"), _row("slow", "slow", start_s=1.0))
    check = _times(one=0.5, slow=0.1)
    earlier = _choose(["auto"], rows, check, Race(limit_s=0.3)).raced

    hurried = _choose(["auto"], rows, check, Race(limit_s=0.3, earlier=earlier))
    patient = _choose(["auto"], rows, check, Race(limit_s=3.0, earlier=earlier))

    assert (hurried.baselines[0].text, hurried.raced) == ("one", earlier)
    assert patient.baselines[0].text == "slow"


def test_the_winner_of_an_earlier_race_is_the_baseline_until_something_is_installed() -> None:
    earlier = tuple(
        Raced(package=f"package {name}", baseline=name, call_ns=1.0) for name in ("one", "open")
    )
    race = Race(earlier=earlier)
    check = _times(one=0.5, open=0.1, new=0.05)
    rows = (_row("onednn", "one"), _row("openblas", "open"))

    again = _choose(["auto"], rows, check, race)
    after_installing = _choose(["auto"], (*rows, _row("new", "new")), check, race)

    assert (again.baselines[0].text, again.raced) == ("one", earlier)
    assert after_installing.baselines[0].text == "new"


def test_the_winner_of_an_earlier_race_may_take_long_to_load() -> None:
    rows = (_row("onednn", "one"), _row("slow", "slow", start_s=1.0))
    raced = _choose(["auto"], rows, _times(one=0.5, slow=0.1), Race(limit_s=3.0)).raced

    again = _choose(["auto"], rows, _times(one=0.1, slow=0.1), Race(limit_s=0.3, earlier=raced))

    assert (again.baselines[0].text, again.raced) == ("slow", raced)


def test_an_earlier_race_tells_no_more_than_a_race_of_what_is_not_installed() -> None:
    earlier = (Raced(package="package open", baseline="open", call_ns=1.0),)
    missing = _row("onednn", missing=NO_GOMP), _row("peer", missing="pip install peer")
    rows = (missing[0], _row("openblas", "open"), missing[1])

    raced = _choose(["auto"], rows, _times(open=0.1))
    remembered = _choose(["auto"], rows, _times(open=0.1), Race(earlier=earlier))

    assert raced.left_out == remembered.left_out == {"onednn": NO_GOMP}


class NewThreads:
    """A runner whose threads share one core for the first `samples` samples: calls take longer."""

    packs_each_copy = False
    packed_weight_bytes = 0

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.waited_ns = 0

    def pack(self, address: int) -> None:
        """Do nothing: there are no weights."""

    def sample(
        self, _weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return a sample of calls of 1 ms, or of 3 ms while threads wait for a core."""
        del warm_up_calls
        self.samples -= 1
        elapsed_ns = timed_calls * (3_000_000 if self.samples >= 0 else 1_000_000)
        self.waited_ns += elapsed_ns // 2 if self.samples >= 0 else 0
        return SampleStruct(elapsed_ns, 0)


@pytest.mark.parametrize(("disturbed", "least_s"), [(0, 0.001), (30, 0.001), (1000, 0.003)])
def test_a_race_waits_for_a_core_for_each_thread_but_not_for_ever(
    disturbed: int, least_s: float
) -> None:
    runner = NewThreads(disturbed)

    found = least_time_s(
        runner,
        WeightCopies(runner, 1, seed=0),
        3_000_000,
        threads=2,
        wait_ns=lambda: runner.waited_ns,
    )

    assert found == pytest.approx(least_s)
    assert runner.samples > disturbed - 200


def test_a_race_on_one_thread_counts_the_time_on_a_core() -> None:
    runner = NewThreads(1000)

    found = least_time_s(
        runner,
        WeightCopies(runner, 1, seed=0),
        3_000_000,
        threads=1,
        wait_ns=lambda: runner.waited_ns,
        cpu_ns=lambda: runner.waited_ns,  # the thread computed as long as it waited
    )

    assert found == pytest.approx(0.0015)


class Noted(NewThreads):
    """A runner that notes of each sample how many calls it had."""

    def __init__(self, runs: list[str]) -> None:
        super().__init__(samples=0)
        self.runs = runs

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return a sample of calls of 1 ms."""
        self.runs.append(f"{timed_calls} calls")
        return super().sample(weights, warm_up_calls=warm_up_calls, timed_calls=timed_calls)


def test_a_race_with_cold_weights_reads_no_copy_twice_after_they_are_pushed_out() -> None:
    runs: list[str] = []
    runner = Noted(runs)

    least_time_s(
        runner,
        WeightCopies(runner, 3, seed=0),
        10_000,
        threads=2,
        push_out=lambda: runs.append("push out"),
        wait_ns=lambda: 0,
    )

    assert runs[:3] == ["push out", "1 calls", "2 calls"]
    assert runs == runs[:3] * (len(runs) // 3)


def test_all_that_are_named_and_usable_are_chosen() -> None:
    choice = _choose(
        ["onednn", "openblas", "scalar"], ROWS, lambda baseline: _checked(baseline.text)
    )

    assert [found.name for found in choice.baselines] == ["openblas", "scalar"]
    assert list(choice.left_out) == ["onednn"]


def test_baseline_whose_check_breaks_is_left_out() -> None:
    def check(baseline: object) -> Checked | str:
        assert isinstance(baseline, Library)
        if baseline.text == "openblas 2":
            raise TrialFailed("the trial broke.")
        return _checked(baseline.text)

    choice = _choose(["openblas", "scalar"], ROWS, check)

    assert [found.name for found in choice.baselines] == ["scalar"]
    assert choice.left_out == {"openblas": "package openblas 2: the trial broke."}


def test_nothing_usable_is_an_error_with_each_reason() -> None:
    with pytest.raises(BaselineMissing, match=r"libgomp.* y is wrong"):
        _choose(["onednn", "openblas"], ROWS, _check)


def test_a_file_in_the_package_is_a_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "new_library.py").write_text(
        "from gemm_tuner.bench.baselines.baseline import Row\n"
        'ROWS = (Row(name="new", place=9, find=lambda materials: []),)\n'
    )
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    list_rows: Callable[[], tuple[Row, ...]] = baseline_rows.__wrapped__

    names = [row.name for row in list_rows()]

    assert "new" in names
    assert names.index("onednn") < names.index("new") < names.index("scalar")
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("libgomp.so.1: cannot open shared object file", "libgomp1 on Debian, libgomp on RHEL"),
        ("file too short", "pip install --force-reinstall"),
    ],
)
def test_advice_fits_what_did_not_load(
    monkeypatch: pytest.MonkeyPatch, reason: str, advice: str
) -> None:
    def refuse(*_path: str, **_mode: int) -> None:
        raise OSError(reason)

    monkeypatch.setattr(ctypes, "CDLL", refuse)

    with pytest.raises(BaselineMissing, match=reason) as refusal:
        load_library(Path("libdnnl.so.3"))

    assert advice in str(refusal.value)


@pytest.mark.baseline("onednn")
def test_what_was_chosen_for_one_problem_is_not_used_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drivers = build_drivers(find_toolchain(), detect_cpu())
    compared: list[int] = []

    def pick_last(runs: Sequence[Callable[[], float]]) -> int:
        compared.append(len(runs))
        return len(runs) - 1

    monkeypatch.setattr("gemm_tuner.bench.baselines.onednn.pick_fastest", pick_last)
    learning, settled = (
        OneDnn(find_onednn(), (drivers.onednn, drivers.finish)) for _process in range(2)
    )
    learning.prepare(_workload("f32 8x32x48 nk row_scale+bias"))
    settled.settle(learning.choice)

    settled.prepare(_workload("f32 8x32x48 nk row_scale+bias"))
    of_first = settled.implementation
    settled.prepare(_workload("f32 8x32x64 nk row_scale+bias"))

    assert of_first == learning.implementation
    assert of_first.endswith("0 of 2 steps fused, then a pass")
    assert len(compared) == 2  # by the process that learns, and for the other problem
    assert min(compared) > 1


@pytest.mark.baseline("onednn")
@pytest.mark.parametrize(
    "text",
    [
        "s8_u8_s32_f16 64x40x7 nk channel_scale+add",
        "u8_s8_s32_f16 64x40x7 nk mish+channel_scale+add",
        "u8_s8_s32_bf16 64x40x7 nk channel_scale+mul",
        "f16 64x40x7 nk bias+mul+add",
        "f32 64x40x7 nk row_scale+bias+add",
    ],
)
def test_each_way_to_ask_onednn_gives_what_is_right(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    drivers = build_drivers(find_toolchain(), detect_cpu())
    problem = Problem.parse(text)
    case = Case(problem, InputKind.NORMAL, seed=1)
    counts, faults = [1], {}
    number = 0
    while number < counts[-1]:

        def pick(runs: Sequence[Callable[[], float]], chosen: int = number) -> int:
            counts.append(len(runs))
            return chosen

        monkeypatch.setattr("gemm_tuner.bench.baselines.onednn.pick_fastest", pick)
        baseline = OneDnn(find_onednn(), (drivers.onednn, drivers.finish))
        found = check_baseline(baseline, problem, case, threads=1)
        if isinstance(found, str):
            faults[baseline.implementation] = found
        number += 1

    assert faults == {}


def _workload(text: str) -> Workload:
    problem = Problem.parse(text)
    return make_workload(problem, make_inputs(problem, InputKind.NORMAL, 1), threads=1)


def test_kernels_of_ours_are_for_one_problem() -> None:
    of_one = {row.name for row in baseline_rows() if row.one_problem}

    assert of_one == {"scalar", "one-thread"}
