"""What is recorded: the grid, the file, and a recording that is stopped and goes on."""

import gzip
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from recordings import PROBLEM, first_candidates, make_recording
from samples import CPU, make_artifact

from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.requests import Baselines
from gemm_tuner.bench.sample import Sample
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, InvalidRecord
from gemm_tuner.replay import recording
from gemm_tuner.replay.grid import beside, evenly, favourites, others
from gemm_tuner.replay.recording import Recording, read_recordings, write_recordings
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.local_search import FAVOURITES
from gemm_tuner.tuning.generator import generator_version

SPACE = Space(problem=PROBLEM, cpu=CPU)
NOW = {"toolchain": find_toolchain().text, "generator": generator_version()}
UNKNOWN_FAMILY = "none_f32_6x16 mc66_nc64_kc64 jc_ic_jr_ir"


@pytest.mark.parametrize("most", [1, 7, 64])
def test_a_grid_begins_as_a_search_and_goes_on_beside_the_fastest(most: int) -> None:
    order = shortlist(SPACE)

    first = favourites([SPACE, SPACE], most)
    near = beside(SPACE, [first[-1]], first, most - len(first))

    begun = round(3 * most / 8) or 1
    assert first[:begun] == order[:begun]
    assert set(first[begun:]) <= set(order[FAVOURITES:] if begun == FAVOURITES else order)
    assert len(first) == len(set(first)) == begun + round(most / 8)
    assert set(near) <= set(SPACE.neighbours(first[-1])) - set(first)
    assert bool(near) == (most > 1)


def test_where_there_are_no_more_neighbours_other_tiles_are_recorded() -> None:
    order = shortlist(SPACE)

    assert others([SPACE], order[:3], 2) == order[3:5]
    assert not others([SPACE], order, 2)


def test_items_are_taken_at_even_distances() -> None:
    assert evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert evenly(range(3), 5) == [0, 1, 2]


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    recordings = [
        make_recording(dict.fromkeys(first_candidates(2), 500.0), regime=regime)
        for regime in Regime
    ]

    write_recordings(tmp_path / "folder" / "one.jsonl.gz", recordings)

    assert read_recordings(tmp_path / "folder" / "one.jsonl.gz") == recordings


def _without_a_race(facts: dict[str, list[dict[str, object]]]) -> None:
    facts["requests"] = [one for one in facts["requests"] if one["stage"] != "race"]


def _of_one_leader(facts: dict[str, list[dict[str, list[object]]]]) -> None:
    final = facts["requests"][-1]
    final["candidates"], final["series"] = final["candidates"][:1], final["series"][:1]


def _of_an_unknown_leader(facts: dict[str, list[dict[str, object]]]) -> None:
    for final in facts["requests"]:
        if final["of_leaders"]:
            final["candidates"] = [0, 7]


def _change(path: str, value: object) -> Callable[[dict[str, object]], None]:
    def change(facts: dict[str, object]) -> None:
        *parts, last = path.split(".")
        place: object = facts
        for part in parts:
            place = place[int(part) if part.isdigit() else part]  # type: ignore[index]
        place[last] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_change("candidates.0.text", "no candidate"), "candidates.0: .*not understood"),
        (_change("candidates.0.text", UNKNOWN_FAMILY), "candidates.0: .*'none_f32' is not known"),
        (_change("problem", "f32 0x"), "'f32 0x'"),
        (_change("problem", "f32 64x64x0 nk none"), "multiplies nothing"),
        (_change("problem", "bf16 64x64x64 nk none"), "does not compute bf16"),
        (_change("prepare_s", 1e8), "prepare_s: .*less than"),
        (_change("requests.0.baseline.elapsed_ns", [2**50] * 15), "baseline.elapsed_ns.0: "),
        (_change("format", 2), "format: "),
        (_change("surplus", 1), "surplus: "),
        (_change("requests.0.candidates", [0]), "requests.0: .*each candidate"),
        (_change("requests.0.stage", "confirm"), "race or in a final"),
        (_change("requests.0.baseline.elapsed_ns", [0] * 15), "positive times"),
        (_without_a_race, "has samples of a race and of a final"),
        (_change("requests.0.of_leaders", value=True), "leaders are timed as in a final"),
        (_of_one_leader, "leaders are of the same correct candidates"),
        (_of_an_unknown_leader, "leaders are of the same correct candidates"),
        (_change("requests.2.candidates", [0, 0]), "takes part in a request once"),
    ],
)
def test_a_line_that_is_no_recording_is_one_error(
    change: Callable[[dict[str, object]], None], told: str, tmp_path: Path
) -> None:
    of_leaders = dict.fromkeys(first_candidates(2), (500.0, 500.0))
    whole = make_recording(dict.fromkeys(first_candidates(2), 500.0), leaders=of_leaders)
    facts = json.loads(whole.model_dump_json())
    change(facts)
    path = tmp_path / "one.jsonl.gz"
    other = make_recording(dict.fromkeys(first_candidates(2), 500.0), regime=Regime.COLD_WEIGHTS)
    lines = f"{other.model_dump_json()}\n{json.dumps(facts)}\n"
    path.write_bytes(gzip.compress(lines.encode()))

    with pytest.raises(InvalidRecord, match=f"one.jsonl.gz, line 2: .*{told}"):
        read_recordings(path)


def test_what_is_recorded_twice_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl.gz"
    write_recordings(path, [make_recording(dict.fromkeys(first_candidates(1), 500.0))] * 2)

    with pytest.raises(InvalidRecord, match=r"line 2: .* is there in this context already"):
        read_recordings(path)


@pytest.mark.parametrize(
    "spoil", [lambda content: content[:-20], lambda _content: b"{}", lambda _content: b"\x1f\x8b"]
)
def test_a_damaged_file_is_one_error(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl.gz"
    write_recordings(path, [make_recording(dict.fromkeys(first_candidates(1), 500.0))])
    path.write_bytes(spoil(path.read_bytes()))

    with pytest.raises(InvalidRecord, match=r"one.jsonl.gz is damaged: .*record it again"):
        read_recordings(path)


def test_many_lines_in_a_small_file_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MAX_FILE_BYTES", 2**16)  # room for a file is taken at once
    path = tmp_path / "one.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 2**22))

    tracemalloc.start()
    try:
        with pytest.raises(InvalidRecord, match=r"one.jsonl.gz, line 1: "):
            read_recordings(path)
        _now, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 2**22


class Host:
    """Stands for the server of trials: the build of `wrong` is, and that of `fastest`."""

    provers = 2

    def __init__(
        self, wrong: str, fastest: str, on_request: Callable[[ExecutionContext], None]
    ) -> None:
        self.wrong = wrong
        self.fastest = fastest
        self.on_request = on_request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing: there is no server."""

    def baselines(self, _regime: Regime) -> Baselines:
        return Baselines(
            texts=("onednn 3.2.0",),
            implementations={},
            raced=(),
            product_only=frozenset(),
            left_out={},
            call_s=1e-6,
        )

    def verify(self, build: Build) -> Finding:
        is_wrong = build.source.text == self.wrong
        return Finding(outcome=Outcome.WRONG if is_wrong else Outcome.CORRECT)

    def time_together(
        self, builds: Sequence[Build], *, context: ExecutionContext, pairs: int, **_rest: object
    ) -> tuple[TimedFinding, ...]:
        self.on_request(context)
        sample = Sample(elapsed_ns=4000, involuntary_switches=1, waited_ns=7)
        slow, fast = (
            Timing(calls_per_sample=4, samples_ns=(elapsed_ns,) * pairs)
            for elapsed_ns in (4000, 2000)
        )
        return tuple(
            TimedFinding(
                finding=Finding(outcome=Outcome.CORRECT),
                measurements=(
                    Measurement(
                        candidate=fast if one.source.text == self.fastest else slow,
                        baseline_timing=slow,
                        baseline="onednn 3.2.0",
                    ),
                ),
                samples=((sample,) * pairs, (sample,) * pairs),
            )
            for one in builds
        )


@pytest.fixture
def requests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[Regime]:
    """Return the regimes of the requests to a server that is none; a parameter says which stops.

    Of five candidates, the second is wrong, the third is the fastest, beside which are the others,
    and the compiler refuses the fourth.
    """
    asked: list[Regime] = []

    def on_request(context: ExecutionContext) -> None:
        asked.append(context.regime)
        if len(asked) == getattr(request, "param", None):
            os.kill(os.getpid(), signal.SIGINT)

    first = favourites([SPACE, SPACE], 5)
    _first, wrong, fastest, refused, _fifth = (
        render(PROBLEM, one, family_named(one.micro_kernel.family)).text
        for one in [*first, *beside(SPACE, first[2:], first, 2)]
    )

    def compile_kernel(source: Source, **_rest: object) -> Build:
        if source.text == refused:
            raise CompilationFailed("no such instruction")
        return Build(artifact=make_artifact(), source=source, binary=b"")

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    recorder, command = "gemm_tuner.replay.recorder", "gemm_tuner.cli.model_record"
    host = Host(wrong, fastest, on_request)
    monkeypatch.setattr(f"{recorder}.start_host", lambda *_args, **_named: host)
    monkeypatch.setattr(f"{recorder}.compile_kernel", compile_kernel)
    monkeypatch.setattr(f"{command}.detect_cpu", lambda: CPU)
    return asked


def _read(path: Path) -> dict[Regime, Recording]:
    return {one.regime: one for one in read_recordings(path)}


@pytest.mark.parametrize("requests", [18], indirect=True)
def test_a_recording_that_is_stopped_goes_on(
    requests: list[Regime], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl.gz"
    command = ["model", "record", "64", "64", "64", "--candidates", "5", "--out", str(path)]

    assert run(command) == 1  # stopped in the second context
    first = _read(path)
    assert run(command) == 0
    both = _read(path)
    assert run(command) == 0

    assert [*first] == [Regime.HOT]
    looks = [Regime.HOT, Regime.COLD_WEIGHTS]
    assert requests == looks + [Regime.HOT] * 13 + [Regime.COLD_WEIGHTS] * (3 + 13)
    assert both[Regime.HOT] == first[Regime.HOT]
    outcomes = [one.outcome for one in both[Regime.COLD_WEIGHTS].candidates]
    assert outcomes == [
        Outcome.CORRECT,
        Outcome.WRONG,
        Outcome.CORRECT,
        Outcome.COMPILE_FAILED,
        Outcome.CORRECT,
    ]
    finals = [one for one in both[Regime.HOT].requests if one.stage is Stage.FINAL]
    assert [sorted(one.candidates) for one in finals] == [[0, 2, 4]] * (2 + 9)
    assert [one.of_leaders for one in finals] == [False] * 2 + [True] * 9
    assert finals[0].series[0].samples == [
        Sample(elapsed_ns=4000, involuntary_switches=1, waited_ns=7)
    ] * len(finals[0].baseline.elapsed_ns)
    told = capsys.readouterr()
    assert "run the same command again" in told.err
    assert "recorded already" in told.err


def test_what_was_recorded_while_this_one_waited_is_kept(
    requests: list[Regime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.jsonl.gz"
    other = make_recording(
        dict.fromkeys(first_candidates(1), 500.0), regime=Regime.COLD_WEIGHTS
    ).model_copy(update=NOW)

    @contextmanager
    def waiting_for_another(_is_stopped: Callable[[], bool]) -> Iterator[None]:
        write_recordings(path, [other])
        yield

    monkeypatch.setattr("gemm_tuner.cli.model_record.measuring", waiting_for_another)
    command = ["model", "record", "64", "64", "64", "--candidates", "5", "--visits", "1"]

    assert run([*command, "--out", str(path)]) == 0

    assert _read(path).keys() == {Regime.HOT, Regime.COLD_WEIGHTS}
    assert _read(path)[Regime.COLD_WEIGHTS] == other
    assert set(requests) == {Regime.HOT}  # nor is it recorded again


def test_two_activations_are_recorded_warm_alone(
    requests: list[Regime], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl.gz"
    command = ["model", "record", "64", "64", "64", "--operation", "matmul", "--visits", "1"]
    command += ["--candidates", "3", "--out", str(path)]

    assert run(command) == 0
    assert run([*command, "--regime", "cold_weights"]) == 2

    assert _read(path).keys() == {Regime.HOT} == set(requests)
    assert "has no weights that could be cold" in capsys.readouterr().err


def test_a_recording_that_goes_on_has_the_same_candidates(
    requests: list[Regime], tmp_path: Path
) -> None:
    """The model favours others where weights are cold."""
    path = tmp_path / "one.jsonl.gz"
    command = ["model", "record", "1", "4096", "4096", "--candidates", "5", "--visits", "1"]
    command += ["--out", str(path)]

    assert run(command) == 0
    whole = _read(path)
    write_recordings(path, [whole[Regime.HOT]])
    assert run(command) == 0

    looks = [Regime.HOT, Regime.COLD_WEIGHTS]
    assert requests == looks + [Regime.HOT] * 11 + [Regime.COLD_WEIGHTS] * (11 + 11)
    texts = [[one.text for one in found.candidates] for found in _read(path).values()]
    assert texts[0] == texts[1] == [one.text for one in whole[Regime.COLD_WEIGHTS].candidates]


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({"toolchain": "gcc 1.0.0"}, False),
        ({"generator": "gemm-tuner 0.0.1+aaaa"}, True),
        ({"generator": "gemm-tuner 0.0.1+aaaa", "recipes": "0" * 64}, False),
        ({"generator": "gemm-tuner 0.0.1+aaaa", "recipes": ""}, False),
    ],
)
def test_a_recording_stands_while_its_sources_compiler_and_flags_do(
    change: dict[str, str],
    requests: list[Regime],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    stands: bool,
) -> None:
    path = tmp_path / "one.jsonl.gz"
    command = ["model", "record", "64", "64", "64", "--candidates", "5", "--visits", "1"]
    command += ["--regime", "hot", "--out", str(path)]
    assert run(command) == 0
    (first,) = read_recordings(path)
    changed = first.model_copy(update=change)
    elsewhere = changed.model_copy(update={"regime": Regime.COLD_WEIGHTS})
    write_recordings(path, [changed, elsewhere])
    requests.clear()

    assert run(command) == 0

    told = capsys.readouterr().err
    assert ("Recording 1 recording anew" not in told) is stands
    assert (not requests) is stands
    if not stands:
        assert f"were by {changed.toolchain} and {changed.generator}." in told
        assert {**NOW, "recipes": first.recipes}.items() <= dict(_read(path)[Regime.HOT]).items()
    assert _read(path)[Regime.COLD_WEIGHTS] == elsewhere  # which nobody asked for


def test_a_place_where_nothing_can_be_written_is_told_before_the_work(
    requests: list[Regime], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()

    assert run(["model", "record", "64", "64", "64", "--out", str(file / "one.jsonl.gz")]) == 2

    assert "its folder cannot be made (File exists); name another." in capsys.readouterr().err
    assert requests == []


def test_the_file_of_another_cpu_is_not_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl.gz"
    write_recordings(path, [make_recording(dict.fromkeys(first_candidates(1), 500.0))])

    assert run(["model", "record", "8", "8", "8", "--out", str(path)]) == 2

    assert "holds what was recorded on AMD EPYC 9B45" in capsys.readouterr().err
