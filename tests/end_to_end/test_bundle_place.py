"""A bundle takes its place at once, and what a killed process has left is cleaned up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import PROBLEM, Site

from gemm_tuner.bundle import place, write
from gemm_tuner.bundle.collect import BundledKernel, Missing, collect
from gemm_tuner.bundle.write import write_bundle
from gemm_tuner.cli.main import INTERRUPTED, WRONG_USAGE, run
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu

HERE = detect_cpu()
CONTEXT = ExecutionContext()
Collected = tuple[tuple[BundledKernel, ...], tuple[Missing, ...]]


@pytest.fixture
def collected(site: Site) -> Collected:
    return collect(site.repository, [PROBLEM], cpu=HERE, context=CONTEXT)


@pytest.fixture
def folder(tmp_path: Path, collected: Collected) -> Path:
    """Return a place that has an older bundle, which can be told from a new one."""
    folder = tmp_path / "at" / "bundle"
    write_bundle(folder, *collected, cpu=HERE, context=CONTEXT)
    (folder / "LICENSE").write_text("older")
    return folder


def is_new(folder: Path) -> bool:
    return (folder / "LICENSE").read_text() != "older"


def write_anew(folder: Path, collected: Collected) -> None:
    write_bundle(folder, *collected, cpu=HERE, context=CONTEXT)


def beside(folder: Path) -> set[str]:
    """Return what there is beside a bundle."""
    return {path.name for path in folder.parent.iterdir()} - {folder.name}


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file system exchange two folders."""
    monkeypatch.setattr(place, "_exchange", lambda _one, _other: False)


def renames(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Let something happen after each renaming."""
    rename = Path.rename

    def renamed(self: Path, target: Any) -> Path:  # noqa: ANN401 - handed on
        moved = rename(self, target)
        then()
        return moved

    monkeypatch.setattr(Path, "rename", renamed)


def in_a_child(work: Callable[[], None]) -> int:
    """Let a child do something; return the signal that ended it, 0 if none did."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def die(*_arguments: object, **_options: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_there_is_a_bundle_at_each_moment(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        assert folder.exists()

    renames(monkeypatch, check)

    write_anew(folder, collected)

    assert is_new(folder)
    assert not beside(folder)


@pytest.mark.usefixtures("without_exchange")
def test_where_folders_are_not_exchanged_they_are_moved(folder: Path, collected: Collected) -> None:
    write_anew(folder, collected)

    assert is_new(folder)
    assert not beside(folder)


@pytest.mark.usefixtures("without_exchange")
def test_an_older_bundle_is_put_back_after_a_fault(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    renames(monkeypatch, fail)

    with pytest.raises(InvalidSetting, match="cannot be written"):
        write_anew(folder, collected)

    assert not is_new(folder)
    assert not beside(folder)


def test_what_a_killed_process_has_left_is_removed(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = folder.parent / ".bundle-of-mine"
    foreign.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(write, "_open_to_all", die)
        assert in_a_child(lambda: write_anew(folder, collected)) == signal.SIGKILL
    assert len(beside(folder)) == 2

    write_anew(folder, collected)

    assert is_new(folder)
    assert beside(folder) == {foreign.name}


@pytest.mark.usefixtures("without_exchange")
def test_a_bundle_that_lost_its_place_to_a_kill_is_put_back(
    folder: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        renames(patch, die)
        assert in_a_child(lambda: write_anew(folder, collected)) == signal.SIGKILL
    assert not folder.exists()

    write_anew(folder.parent / "another", collected)

    assert not is_new(folder)
    assert beside(folder) == {"another"}


def test_what_a_living_process_makes_is_left_alone(folder: Path, collected: Collected) -> None:
    with place.replacing(folder.parent / "slow") as made:
        (made / "file").touch()
        write_anew(folder, collected)
        assert (made / "file").exists()

    assert beside(folder) == {"slow"}


@pytest.fixture
def words(tmp_path: Path, site: Site) -> list[str]:
    """Return a command for a bundle in a folder that is to be named."""
    (tmp_path / "layers.csv").write_text("name,m,n,k,epilogue\none,8,32,16,bias+relu\n")
    return ["bundle", str(tmp_path / "layers.csv"), "--db", site.settings.database_url]


def test_a_command_that_is_ended_cleans_up(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_open_to_all", lambda _made: os.kill(os.getpid(), signal.SIGTERM))

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # or a fault would end the tests
    try:
        code = run([*words, str(folder)])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)

    assert code == INTERRUPTED
    assert not is_new(folder)
    assert not beside(folder)


def test_the_command_tells_how_far_it_is(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, str(folder)]) == 0

    assert "bundle: layers looked up 1 of 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "..", "/", ""])
def test_the_folder_of_the_process_is_not_replaced(
    name: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "deep" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "here")

    assert run([*words, name]) == WRONG_USAGE

    told = capsys.readouterr().err
    assert "name a" in told or "name another" in told
    assert list((tmp_path / "deep").rglob("*")) == [tmp_path / "deep" / "here"]
