"""What the texts of options mean, and how numbers are printed."""

from pathlib import Path

import pytest

from gemm_tuner.cli import main
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.arguments.options import execution_contexts, parse_duration_s
from gemm_tuner.cli.main import run
from gemm_tuner.cli.terminal.output import print_table
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import duration_text, time_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.tuning.generator import generator_version


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("2m", 120), ("500ms", 0.5), ("1h", 3600), ("1.5", 1.5)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0s", "-3s", "3 days", "s", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="not understood"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["db", "prune", "--delete", "--db", ""],
        ["resolve", "8", "8", "8", "--db="],
        ["serve", "--socket", ""],
        ["serve", "--key", ""],
        ["keys", "rotate", "--key="],
        ["report", "--out", ""],
        ["lock", "8", "8", "8", "--file", ""],
        ["sweep", "--shapes", ""],
    ],
    ids=" ".join,
)
def test_an_empty_option_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == main.WRONG_USAGE

    name = next(one for one in reversed(arguments) if one.startswith("--")).removesuffix("=")
    assert capsys.readouterr().err.startswith(f"Error: {name} is empty; give it a value")


def test_what_follows_for_a_script_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    run(["collect", "none.py", "--", "--name", ""])

    assert "is empty" not in capsys.readouterr().err


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite+pysqlite:///"])
def test_a_database_in_memory_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"sqlite:///{tmp_path}/store.sqlite3"
    create = ["tokens", "create", "a", "--scope", "resolve"]
    for arguments in (
        [*create, "--db", url],
        ["serve", "--workers", "0", "--db", url],
        ["db", "copy", file, url],
        ["db", "copy", url, file],
        ["report", "--compare", url],
        ["model", "train", "--db", url],
    ):
        assert run(arguments) == main.WRONG_USAGE
        assert "nothing would be kept of a database in memory" in capsys.readouterr().err

    monkeypatch.setenv("GEMM_TUNER_DB", url)
    assert run(create) == main.WRONG_USAGE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("urls", [("", "sqlite:///x"), ("sqlite:///x", "")])
def test_no_copy_takes_an_empty_url_for_the_own_database(
    urls: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["db", "copy", *urls]) == main.WRONG_USAGE
    assert "a database URL is empty" in capsys.readouterr().err


def test_the_version_is_that_of_the_generator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0

    assert capsys.readouterr().out == f"{generator_version()}\n"


def test_an_epilogue_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("clamp:100:200", ["candidate"], [["[bold]scale:100:"]])

    assert capsys.readouterr().out == "clamp:100:200\n  candidate\n  [bold]scale:100:\n"


def test_both_regimes_make_two_contexts() -> None:
    contexts = execution_contexts(2, "both")

    assert [context.regime for context in contexts] == [Regime.HOT, Regime.COLD_WEIGHTS]
    assert {context.threads for context in contexts} == {2}


@pytest.mark.parametrize(
    ("problem", "regime", "regimes"),
    [
        ("f32 1x2x3", "both", [Regime.HOT, Regime.COLD_WEIGHTS]),
        ("matmul f32 1x2x3", "both", [Regime.HOT]),
        ("matmul f32 1x2x3", "cold_weights", [Regime.COLD_WEIGHTS]),  # which is then refused
    ],
)
def test_two_activations_have_one_of_two_regimes(
    problem: str, regime: str, regimes: list[Regime]
) -> None:
    layer = Layer(name="one", problem=Problem.parse(problem))

    contexts = layer.contexts_of(execution_contexts(2, regime))

    assert [context.regime for context in contexts] == regimes


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_of_layers_is_read(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    path.write_text(
        "name,m,n,k,epilogue,from,dtype,w_layout\n"
        "up,128,3072,768,bias+gelu_erf,BERT,,nk\n,1..64,8,9,,,int8\n",
        encoding,
    )

    layers = layers_of(
        m=None, n=None, k=None, shapes=path, dtype="f32", epilogue="relu", w_layout="kn"
    )

    assert [(layer.name, layer.problem.text) for layer in layers] == [
        ("up", "f32 128x3072x768 nk bias+gelu_erf"),
        ("1..64x8x9", "u8_s8_s32_f32 1..64x8x9 kn relu"),
    ]


def test_a_column_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    path.write_text("name,m,n,k,reduction,reduction\none,1,2,3,fixed,any\n")

    with pytest.raises(InvalidSetting, match="has the column reduction more than once"):
        layers_of(m=None, n=None, k=None, shapes=path, dtype="f32", epilogue="none", w_layout="nk")


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [(0.5, "0.5 ns"), (412, "412 ns"), (999.6, "1 µs"), (1240, "1.24 µs"), (3.02e6, "3.02 ms"),
     (2e9, "2 s")],
)  # fmt: skip
def test_times_have_a_fitting_unit(time_ns: float, text: str) -> None:
    assert time_text(time_ns) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (12, "12 s"), (200, "3 min 20 s"), (59.7, "1 min 0 s"), (7260, "2 h 1 min")],
)
def test_durations_are_printed_as_people_write_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_tables_are_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", ("name", ">time"), [("a" * 200, "1 ns"), ("b", "100 ns")])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Title"
    assert lines[2] == f"  {'a' * 200}     1 ns"
    assert lines[3] == f"  b{' ' * 199}   100 ns"


def test_each_command_that_takes_an_epilogue_takes_a_reduction() -> None:
    texts = {path.name: path.read_text() for path in Path(main.__file__).parent.glob("*.py")}
    asking = {name for name, text in texts.items() if "options.EpilogueText" in text}

    assert len(asking) > 10
    assert asking == {name for name, text in texts.items() if "options.ReductionName" in text}
