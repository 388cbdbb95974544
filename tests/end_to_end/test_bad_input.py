"""Wrong input at the command line: the exit code, one clear line, and never a traceback."""

import os
import socket
from pathlib import Path

import pytest

from gemm_tuner.cli.main import run
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

WRONG_USAGE = 2
SOMETHING_IS_MISSING = 3

# fmt: off
WRONG = [
    # arguments,                                          part of the message
    (["sweep", "-1", "64", "64"],                         "-1 is out of range"),
    (["sweep", "--", "-1", "64", "64"],                   "-1 is out of range"),
    (["sweep", "64", "64", "1000000000000"],              "k = 1000000000000 is out of range"),
    (["sweep", "0", "64", "64"],                          "0x64x64 nk none' multiplies nothing"),
    (["sweep", "1,0..8,0", "64", "64"],                   "0x64x64 nk none' multiplies nothing"),
    (["sweep", "64", "0", "64", "--dry-run"],             "64x0x64 nk none' multiplies nothing"),
    (["sweep", "4", "8", "16", "--operation", "matmul", "--regime", "cold_weights", "--dry-run"],
                                                          "has no weights that could be cold"),
    (["sweep", "64", "64", "0", "--target", "zen4"],      "64x64x0 nk none' multiplies nothing"),
    (["bench", "64", "64", "0"],                          "multiplies nothing"),
    (["resolve", "0", "64", "64"],                        "multiplies nothing"),
    (["resolve", "0", "1", "1", "--url", "http://h"],     "multiplies nothing"),
    (["explain", "64", "0", "64"],                        "multiplies nothing"),
    (["sweep", "64", "64", "sixty"],                      "value for 'K'"),
    (["sweep", "64", "64"],                               "give M, N and K"),
    (["sweep"],                                           "give either M N K or --shapes"),
    (["explain", "1", "2", "3", "--epilogue", "gelu"],    "but gelu_erf or gelu_tanh is"),
    (["sweep", "64x32x16"],                               "sizes '64x32x16' are not complete"),
    (["sweep", "9..3", "64", "64"],                       "9..3"),
    (["sweep", "2000000000", "2000000000", "1"],          "split the problem"),
    (["sweep", "64", "64", "64", "--dtype", "f31"],       "dtype 'f31' is not known; use one"),
    (["sweep", "64", "64", "64", "--dtype", "FP32"],      "'FP32' is not known, but f32 is; use"),
    (["sweep", "64", "64", "64", "--epilogue", "rleu"],   "epilogue step 'rleu' is not known"),
    (["sweep", "64", "64", "64", "--w-layout", "mn"],     "weight layout 'mn' is not known"),
    (["sweep", "64", "64", "64", "--threads", "0"],       "threads = 0 is out of range"),
    (["sweep", "64", "64", "64", "--threads", "-1"],      "threads = -1 is out of range"),
    (["sweep", "64", "64", "64", "--budget", "-5s"],      "duration '-5s' is not understood"),
    (["sweep", "64", "64", "64", "--regime", "warm"],     "regime 'warm' is not known"),
    (["sweep", "64", "64", "64", "--budget", "soon"],     "duration 'soon' is not understood"),
    (["sweep", "64", "64", "64", "--compiler", "tcc"],    "compiler 'tcc' is not known"),
    (["sweep", "64", "64", "64", "--db", "nonsense"],     "database URL"),
    (["sweep", "1,2", "8", "8", "--share-weights", "--max-loss", "200"], "--max-loss 200 is out"),
    (["sweep", "1,2", "8", "8", "--share-weights", "--max-loss", "nan"], "--max-loss nan is out"),
    (["sweep", "1", "8", "8", "--max-loss", "5"],         "give --share-weights too"),
    (["sweep", "--shapes", "absent.csv"],                 "absent.csv cannot be read"),
    (["explain", "64", "64", "64", "--regime", "both"],   "regime 'both' names two"),
    (["source", "64", "64", "64", "--candidate", "fast"], "candidate 'fast' is not understood"),
    (["source", "4", "4", "4", "--candidate", "avx512_bf16_8x48 mc8_nc48_kc4 jc_ic_jr_ir"],
     "does not compute f32"),
    (["source", "4", "4", "4", "--candidate", "avx512_f32_8x40 mc8_nc40_kc4 jc_ic_jr_ir"],
     "no register tile 8x40"),
    (["verify", "64", "64", "64", "--candidate", "fast"], "candidate 'fast' is not understood"),
    (["verify", "4", "4", "4", "--candidate", "avx512_bf16_8x48 mc8_nc48_kc4 jc_ic_jr_ir"],
     "does not compute f32"),
    (["records", "import"],                               "give either a FILE or --shipped"),
    (["records", "import", "absent.jsonl"],               "absent.jsonl cannot be read"),
    (["resolve", "64", "64", "64", "--url", "ftp://x"],   "service address 'ftp://x'"),
    (["resolve", "1", "1", "1", "--url", "http://[::1"],  "service address 'http://[::1'"),
    (["resolve", "1", "1", "1", "--url", "http://h:abc"], "service address 'http://h:abc'"),
    (["resolve", "1", "1", "1", "--url", "http://h:70000"], "service address 'http://h:70000'"),
    (["source", "1", "1", "1", "--binary", "k.so", "--candidate", "x"], "only a winner has a lib"),
    (["source", "1", "1", "1", "--header", "absent/gemm_tuner.h"], "absent/gemm_tuner.h cannot be"),
    (["swep"],                                            "swep"),
    (["sweep", "64", "64", "64", "--bugdet", "3s"],       "--bugdet"),
]
# fmt: on


def test_a_refused_source_writes_no_header(tmp_path: Path) -> None:
    header = tmp_path / "gemm_tuner.h"
    files = ["--header", str(header), "--binary", str(tmp_path / "k.so"), "--candidate", "x"]

    assert run(["source", "1", "1", "1", *files]) == 2

    assert not header.exists()


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_wrong_usage_is_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(arguments)

    captured = capsys.readouterr()
    assert code == WRONG_USAGE
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("Error: ")
    assert message in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,m,n\na,1,2\n", "no column k"),
        ("name,m,n,k\n", "no layer"),
        ("", "no column name, m, n, k"),
        ("m;n;k\n1;2;3\n", "no column name, m, n, k, but 'm;n;k'"),
        ("name,m,n,k\na,1,2,3\nb,1,two,3\n", "line 3: n = 'two'"),
        ("name,m,n,k,epilogue\na,1,2,3,bais\n", "line 2: epilogue step 'bais'"),
        ("name,m,n,k\na,1\n", "line 2: there is no cell for the columns n, k"),
        ("name,m,n,k\na,1,2,3\nb,1,2,\n", "line 3: k = '' is not a whole number"),
        ("name,m,n,k\na,1,1_000,3\n", "line 2: n = '1_000' is not understood"),
        ("name,m,n,k\na,1,2,\u0663\n", "line 2: k = '\u0663' is not a whole number"),
        (
            'name,m,n,k\na,1,2,3\nb,1,"2,3\nc,1,2,3\n',
            "line 3, column n: a quote is opened and never closed",
        ),
        ('name,m,n,k\n"a,1,2,3\n', "line 2, column name: a quote is opened and never closed"),
        ('"name,m,n,k\na,1,2,3\n', "line 1, column 1: a quote is opened and never closed"),
        ('name,m,n,k\n"a"b,1,2,3\n', "line 2, column name: ',' expected after"),
        (
            "name,m,n,k\na,1,2,3\nb,1,0,3\n",
            "line 3: problem 'f32 1x0x3 nk none' multiplies nothing",
        ),
        ("name,m,n,k,Epilog\na,1,2,3,bias\n", "the column epilog"),
        ("name,m,n,k\na,1,2,3,bias\n", "line 2: there are more cells than columns"),
    ],
)
def test_a_wrong_shapes_file_names_the_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(text)

    code = run(["sweep", "--shapes", str(shapes), "--dry-run"])

    captured = capsys.readouterr()
    assert code == WRONG_USAGE
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_spaces_and_capitals_in_a_shapes_file_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("name, M, N, K, dtype\nfirst, 1, 2, 3, bf16\n")

    assert run(["sweep", "--shapes", str(shapes), "--dry-run"]) == 0
    assert "bf16 1x2x3 nk none" in capsys.readouterr().out


def test_every_wrong_line_of_a_shapes_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.csv"
    lines = ["name,m,n,k", "a,1,2,3", "b,1,two,3", "c,1,2,3", "d,9..3,2,3", "e,1,2,0"]
    shapes.write_text("\n".join(lines))

    code = run(["sweep", "--shapes", str(shapes), "--dry-run"])

    first, *told = capsys.readouterr().err.splitlines()
    assert code == WRONG_USAGE
    assert first == "Error: 3 lines cannot be used; correct them:"
    assert [line.split("line ")[1].split(":")[0] for line in told] == ["3", "5", "6"]


def test_a_long_list_of_wrong_lines_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("name,m,n,k\n" + f"long,1,{'x' * 5000},3\n" * 500)

    code = run(["sweep", "--shapes", str(shapes), "--dry-run"])

    told = capsys.readouterr().err
    assert code == WRONG_USAGE
    assert told.startswith("Error: 500 lines cannot be used")
    assert told.endswith("and 480 more\n")
    assert len(told) < 5000


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (["--dtype", "f31"], ["f32", "bf16", "f16", "int8", "bf16_s4", "x_w_accumulator_y"]),
        (["--dtype", "s8"], ["f32", "int8", "f32_s8"]),
        (["--dtype", "bf16_s4"], ["32, 64, 128 or k", "--groups"]),
        (["--dtype", "bf16_s4", "--groups", "48"], ["32, 64, 128 or k"]),
        (["--dtype", "bf16_s4", "--groups", "all"], ["32, 64, 128 or k"]),
        (["--groups", "32"], ["others have none"]),
    ],
)
def test_an_unknown_type_or_group_is_answered_with_the_choices(
    arguments: list[str], choices: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["resolve", "8", "8", "8", *arguments])

    message = capsys.readouterr().err
    assert code == WRONG_USAGE
    assert all(choice in message for choice in choices)


@pytest.mark.parametrize("command", ["sweep", "bench", "tune-shortlist", "adopt"])
def test_more_threads_than_cpus_are_not_timed(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("gemm_tuner.machine.cpus.usable_cpus", lambda: 2)
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    code = run([command, "1", "64", "64", "--threads", "16", "--db", url])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err == (
        "Error: 16 threads cannot be timed here, because this process may use 2 CPUs; run it on a "
        "machine with 16 or more, or use --threads 2.\n"
    )


def test_a_setting_that_every_kernel_would_fail_for_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No candidate is noted as failed for it, neither now nor in a later sweep."""
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    monkeypatch.setenv("GEMM_TUNER_PIN", "maybe")

    assert run(["sweep", "8", "16", "16", "--budget", "1s", "--db", url]) == WRONG_USAGE

    assert "Error: GEMM_TUNER_PIN is 'maybe'; use 1" in capsys.readouterr().err
    assert not Repository(open_database(url)).trials(problem=Problem.parse("f32 8x16x16 nk none"))


def test_more_threads_than_cpus_are_only_a_question_to_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemm_tuner.machine.cpus.usable_cpus", lambda: 2)
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    code = run(["resolve", "1", "64", "64", "--threads", "16", "--db", url])

    assert code == 1
    assert capsys.readouterr().err == ""


READING = [
    ["resolve", "64", "64", "64"],
    ["explain", "64", "64", "64"],
    ["source", "64", "64", "64"],
    ["bench", "64", "64", "64"],
    ["model", "report"],
    ["records", "export"],
]


@pytest.mark.parametrize("command", READING)
def test_a_mistyped_database_is_named_and_not_made(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*command, "--db", f"sqlite:///{tmp_path}/mistyped.sqlite3"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert f"there is no database sqlite:///{tmp_path}/mistyped.sqlite3" in captured.err
    assert list(tmp_path.glob("*.sqlite3")) == []


@pytest.mark.parametrize("command", [*READING, ["serve"], ["records", "import", "--shipped"]])
@pytest.mark.parametrize("kind", ["folder", "text"])
def test_what_is_no_database_is_named(
    kind: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_text("these are notes, not a database " * 100)

    code = run([*command, "--db", f"sqlite:///{path}"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    fault = "is not a plain file" if kind == "folder" else "is no SQLite database"
    assert f"{path} {fault}" in captured.err


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["serve"], "cannot be opened: "),
        (["records", "import", "--shipped"], "cannot be opened for writing: "),
    ],
    ids=str,
)
def test_an_unwritable_database_is_named(
    command: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")

    code = run([*command, "--db", f"sqlite:///{tmp_path}/file/db.sqlite3"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert what in captured.err


@pytest.mark.parametrize("command", [["records", "export"], ["tokens", "list"]], ids=str)
def test_who_only_reads_is_not_told_of_writing(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The port 9 of this machine is nobody's."""
    code = run([*command, "--db", "postgresql://nobody@127.0.0.1:9/none?connect_timeout=2"])

    assert code == SOMETHING_IS_MISSING
    assert "none?connect_timeout=2 cannot be opened: " in capsys.readouterr().err


def test_an_unwritable_data_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))

    code = run(["explain", "64", "64", "64"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert "--db or GEMM_TUNER_DB" in captured.err


def test_a_signing_key_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")

    code = run(["serve", "--key", str(tmp_path / "file" / "key.pem")])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert "file/key.pem cannot be read or made" in captured.err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = run(["serve", "--port", str(port)])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert f"nothing can listen at 127.0.0.1, port {port}" in captured.err


def test_a_missing_service_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["resolve", "64", "64", "64", "--url", "http://127.0.0.1:9"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert "http://127.0.0.1:9 does not answer" in captured.err


def test_an_unexpected_error_is_one_line_that_says_where_to_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode() -> None:
        raise RuntimeError("the moon is full")

    monkeypatch.setattr("gemm_tuner.cli.explain.detect_cpu", explode)

    code = run(["explain", "64", "64", "64"])

    captured = capsys.readouterr()
    assert code == SOMETHING_IS_MISSING
    assert captured.err.count("\n") == 1
    assert "RuntimeError: the moon is full" in captured.err
    assert "report it" in captured.err


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code = run([])

    assert code == 0
    assert "quickstart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "kind", "code"),
    [
        (["sweep", "--dry-run", "--shapes"], "pipe", WRONG_USAGE),
        (["sweep", "--dry-run", "--shapes"], "device", WRONG_USAGE),
        (["records", "import"], "pipe", WRONG_USAGE),
        (["records", "import"], "device", WRONG_USAGE),
        (["serve", "--key"], "pipe", SOMETHING_IS_MISSING),
        (["resolve", "1", "1", "1", "--db"], "pipe", SOMETHING_IS_MISSING),
        (["resolve", "1", "1", "1", "--db"], "device", SOMETHING_IS_MISSING),
    ],
)
@pytest.mark.timeout(20)
def test_what_is_no_plain_file_is_not_read(
    command: list[str], kind: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    given = f"sqlite:///{path}" if command[-1] == "--db" else str(path)

    assert run([*command, given]) == code

    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"{path} is not a plain file" in captured.err


@pytest.mark.parametrize("kind", ["pipe", "device", "junk"])
@pytest.mark.timeout(20)
def test_a_file_of_pinned_keys_that_holds_none_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("junk")
    monkeypatch.setenv("GEMM_TUNER_KEYS", str(path))

    assert run(["keys", "list"]) == WRONG_USAGE

    assert f"GEMM_TUNER_KEYS names {path}, which holds no public keys" in capsys.readouterr().err


def test_a_shapes_file_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shapes.csv"
    with path.open("wb") as file:
        file.truncate(2**40)

    assert run(["sweep", "--dry-run", "--shapes", str(path)]) == WRONG_USAGE

    assert f"{path} is longer than" in capsys.readouterr().err


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x9b", "\x7f"])
def test_a_name_that_moves_the_cursor_is_refused(
    character: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(f"name,m,n,k\nred{character}[31m,1,2,3\n")

    assert run(["sweep", "--shapes", str(shapes), "--dry-run"]) == WRONG_USAGE

    captured = capsys.readouterr()
    assert character not in captured.err + captured.out
    assert f"line 2: the name {f'red{character}[31m'!r} holds a control character" in captured.err


SECRET = "hunter2"  # noqa: S105 - what must not be printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["resolve", "1", "1", "1", "--url", f"http://me:{SECRET}@127.0.0.1:9"],
        ["resolve", "1", "1", "1", "--url", f"http://me:{SECRET}@192.0.2.1:9"],
        ["resolve", "1", "1", "1", "--url", f"ftp://me:{SECRET}@h"],
        ["resolve", "1", "1", "1", "--url", f"http://me:a/{SECRET}@h"],
        ["resolve", "1", "1", "1", "--url", f"http://me:a@b:{SECRET}@h:port"],
        ["keys", "accept", f"http://me:{SECRET}@127.0.0.1:9"],
        ["resolve", "1", "1", "1", "--db", f"oracle-none://me:{SECRET}@h/db"],
        ["resolve", "1", "1", "1", "--db", f"postgresql+none://me:{SECRET}@h/db"],
        ["resolve", "1", "1", "1", "--db", f"postgresql+none://h/db?password={SECRET}"],
        ["resolve", "1", "1", "1", "--db", f"sqlite://me:{SECRET}@h:port/db"],
        ["resolve", "1", "1", "1", "--db", f"me:{SECRET}@h"],
    ],
    ids=str,
)
def test_a_password_in_an_address_is_not_printed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) != 0

    captured = capsys.readouterr()
    assert captured.err.startswith("Error: ")
    assert SECRET not in captured.err + captured.out


def test_the_password_of_a_proxy_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", f"socks5://me:{SECRET}@proxy:1080")

    run(["keys", "accept", "http://192.0.2.1:8000"])

    captured = capsys.readouterr()
    assert "socks5://me:***@proxy:1080" in captured.err
    assert SECRET not in captured.err
