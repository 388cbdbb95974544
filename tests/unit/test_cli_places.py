"""Where commands write files: what cannot be written is said before the work."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from gemm_tuner_service.server.listening import listen_on_socket
from restricted import full_disk, obeying_permissions

from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.main import WRONG_USAGE, run
from gemm_tuner.client.lock import read_lock, write_lock
from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.models.results import Results
from gemm_tuner.store.sql.database import open_database

CHECK = """
import sys
from pathlib import Path
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.user_file import user_file

for place in map(Path, sys.argv[1:]):
    for what in (check_place, lambda path: user_file(path).__enter__()):
        try:
            what(place)
        except GemmTunerError as error:
            print(error)
"""


SIMULATE = ["simulate", "1", "256", "256", "--target", "zen5", "--threads", "1,2"]
# Commands that write a file, whose name is the last argument.
WRITERS = [
    ["records", "export"],
    ["source", "64", "64", "64", "--header"],
    ["source", "64", "64", "64", "--binary"],
    ["bench", "64", "64", "64", "--plot"],
    ["model", "train", "--out"],
    ["report", "--out"],
    ["bench-models", "--out"],
]


@pytest.mark.parametrize("name", ["database.svg", "link.svg", "wal.svg"])
@pytest.mark.parametrize(
    "command",
    [*WRITERS, ["simulate", "1", "64", "64", "--threads", "1", "--plot"]],
    ids=" ".join,
)
def test_no_command_writes_over_its_database(
    command: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "database.svg"
    open_database(f"sqlite:///{database}").dispose()
    (tmp_path / "link.svg").symlink_to(database)
    (tmp_path / "wal.svg").symlink_to(f"{database}-wal")
    before = database.read_bytes()

    code = run([*command, str(tmp_path / name), "--db", f"sqlite:///{database}"])

    assert code == WRONG_USAGE
    assert f"{name} cannot be written: it is a file of the database" in capsys.readouterr().err
    assert database.read_bytes() == before


def test_a_database_may_be_called_as_a_url_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    open_database("sqlite:///file:a").dispose()
    before = Path("file:a").read_bytes()

    assert run(["records", "export", "file:a", "--db", "sqlite:///file:a"]) == WRONG_USAGE
    assert "it is a file of the database" in capsys.readouterr().err
    assert Path("file:a").read_bytes() == before
    assert stat.S_IMODE(Path("file:a").stat().st_mode) == 0o600


def test_a_picture_of_another_cpu_needs_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_DB", "of a typing error")

    assert run([*SIMULATE, "--plot", str(tmp_path / "a.svg")]) == 0


@pytest.mark.parametrize(
    "command",
    [
        *WRITERS,
        [*SIMULATE, "--plot"],
        ["model", "record", "1", "64", "64", "--out"],
        ["lock", "64", "64", "64", "--file"],
        ["collect", __file__, "--out"],
        ["db", "mirror"],
        ["serve", "--workers", "0", "--socket"],
        ["serve", "--workers", "0", "--key"],
        ["keys", "rotate", "--key"],
    ],
    ids=" ".join,
)
def test_no_command_writes_over_the_users_own_database(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = _own_folder(tmp_path, monkeypatch) / "gemm-tuner.sqlite3"
    monkeypatch.delenv("GEMM_TUNER_DB", raising=False)
    open_database().dispose()
    before = own.read_bytes()
    monkeypatch.setenv("GEMM_TUNER_DB", f"sqlite:///{tmp_path}/other.sqlite3")
    open_database().dispose()
    (tmp_path / "link.svg").symlink_to(own)
    (tmp_path / "wal.svg").symlink_to(f"{own}-wal")
    (tmp_path / "other.svg").symlink_to(tmp_path / "other.sqlite3-journal")

    for name in ("link.svg", "wal.svg", "other.svg"):
        assert run([*command, str(tmp_path / name)]) == WRONG_USAGE
        told = capsys.readouterr().err
        assert f"{name} cannot be written: it is a file of the database" in told
    assert own.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    [
        "measuring-key.pem",
        "measuring-keys.txt",
        "signing-key.pem",
        "signing-key.pem.successions.json",
        "known-keys.json",
    ],
)
def test_no_file_takes_the_place_of_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _own_folder(tmp_path, monkeypatch)
    (tmp_path / "link").symlink_to(folder / name)

    for place in (folder / name, tmp_path / "link"):
        with pytest.raises(InvalidSetting, match="cannot be written: keys are kept in it"):
            check_place(place)

    monkeypatch.setenv("GEMM_TUNER_SIGNING_KEY", str(folder / "ranker.json"))
    with pytest.raises(InvalidSetting, match="cannot be written: keys are kept in it"):
        check_place(folder / "ranker.json")
    monkeypatch.delenv("GEMM_TUNER_SIGNING_KEY")
    check_place(folder / "ranker.json")


@pytest.mark.parametrize(
    ("name", "why"), [("", "databases and keys are kept in it"), ("known-keys.json", "keys are")]
)
def test_a_public_folder_is_none_of_keys(
    name: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = _own_folder(tmp_path, monkeypatch)

    assert run(["db", "mirror", str(folder / name)]) == WRONG_USAGE

    assert why in capsys.readouterr().err
    assert not (folder / "v1").exists()


def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's data directory, made anew."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder = tmp_path / "data" / "gemm-tuner"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("command", "read"),
    [
        (["model", "train", "{}", "--out"], "recordings.jsonl.gz"),
        (["model", "record", "--shapes", "{}", "--out"], "layers.csv"),
        (["bench", "--shapes", "{}", "--plot"], "layers.csv"),
        (["lock", "--shapes", "{}", "--file"], "layers.csv"),
        (["source", "64", "64", "64", "--header", "{}", "--binary"], "kernel.h"),
        (["collect", "{}", "--out"], "script.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_no_command_writes_over_what_it_reads(
    command: list[str], read: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link = tmp_path / read, tmp_path / "link"
    file.write_text("name,m,n,k\na,1,64,64\n")
    link.symlink_to(file)
    before = file.read_bytes()

    code = run([*(part.format(file) for part in command), str(link)])

    assert code == WRONG_USAGE
    assert "link cannot be written: the command reads or writes it" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("command", ["train", "record"])
def test_the_folder_of_a_model_is_made(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    asked = {
        "train": [str(tmp_path / "empty")],
        "record": ["1", "16", "16", "--compiler", "of-nobody"],
    }

    run(["model", command, *asked[command], "--out", str(tmp_path / "new" / "out")])

    assert "cannot be written" not in capsys.readouterr().err
    assert (tmp_path / "new").is_dir()


def test_a_file_of_another_user_in_a_shared_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a"
    place.touch()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)

    with pytest.raises(InvalidSetting, match="lets only the file's owner replace it"):
        check_place(place)

    check_place(tmp_path / "new")


def test_the_files_beside_a_linked_database_are_known(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("database")
    open_database(f"sqlite:///{tmp_path}/database").dispose()

    with pytest.raises(InvalidSetting, match="it is a file of the database"):
        check_place(tmp_path / "database-wal", databases=[f"sqlite:///{tmp_path}/link"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".", "it is a folder"),
        ("none/file", "there is no folder {}/none"),
        ("to_none", "there is no folder {}/none"),
        ("circle", "Too many levels of symbolic links"),
        ("x" * 256, "File name too long"),
    ],
)
def test_a_place_where_no_file_can_be_is_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "to_none").symlink_to(tmp_path / "none" / "file")
    (tmp_path / "circle").symlink_to("circle")

    with pytest.raises(InvalidSetting, match=why.format(tmp_path)):
        check_place(tmp_path / name)


def test_a_place_where_a_file_can_be_is_taken(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "open").open("wb") as opened:
        for place in ("link", "new", "pipe", f"/dev/fd/{opened.fileno()}"):
            check_place(tmp_path / place)


def test_modes_of_files_and_folders_are_obeyed(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.touch()
    file.chmod(0o444)
    folder.mkdir()
    (folder / "file").touch(mode=0o666)
    link.symlink_to(folder / "file")
    folder.chmod(0o555)
    places = [file, folder / "file", link, folder / "new"]

    command = obeying_permissions([sys.executable, "-c", CHECK, *map(str, places)])
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    folder.chmod(0o755)

    assert [line.partition(": ")[0] for line in told.splitlines()] == [
        f"file {place} cannot be written" for place in places for _ in range(2)
    ]
    assert told.lower().count("permission denied") == 2 * len(places)


def test_a_picture_stays_where_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "picture.svg"
    picture.write_text("an older one")

    with full_disk(1024):
        assert run([*SIMULATE, "--plot", str(picture)]) == WRONG_USAGE

    assert f"{picture} cannot be written: File too large" in capsys.readouterr().err
    assert picture.read_text() == "an older one"


def test_a_lock_file_is_written_through_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "project.lock", tmp_path / "gemm-tuner.lock"
    file.touch()
    file.chmod(0o644)
    link.symlink_to("project.lock")

    write_lock(link, [])

    assert link.is_symlink()
    assert read_lock(file) == {}
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_lock_file_that_cannot_be_written_is_told_before_a_service_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, place = tmp_path / "pipe", tmp_path / "none" / "gemm-tuner.lock"
    os.mkfifo(pipe)

    code = run(["lock", "1", "64", "64", "--url", "http://127.0.0.1:1", "--file", str(place)])
    with pytest.raises(InvalidSetting, match=r"No such device or address; name another\."):
        write_lock(pipe, [])

    assert code == WRONG_USAGE
    assert "there is no folder" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_socket_in_the_place_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.touch()

    with pytest.raises(MissingCapability, match="File exists"), listen_on_socket(file):
        pass

    assert list(tmp_path.iterdir()) == [file]


def test_results_are_kept_through_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "results.json", tmp_path / "folder" / "results.json"
    file.parent.mkdir()
    link.symlink_to(file)

    Results(link).check()

    assert link.is_symlink()
    assert Results(file).runs() == ()
    assert file.is_file()
