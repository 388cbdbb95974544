"""Folders to work in for a while, and what killed processes leave of them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gemm_tuner.scratch import scratch_folder

PREFIX = "work-"
LOCK = ".gemm-tuner-lock"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Return a folder with a file whose process was killed."""
    dying = (
        "import os, sys; from pathlib import Path\n"
        "from gemm_tuner.scratch import scratch_folder\n"
        f"with scratch_folder({PREFIX!r}, parent=Path(sys.argv[1])) as made:\n"
        "    (made / 'file').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", dying, str(tmp_path)], check=False)
    (folder,) = tmp_path.iterdir()
    assert (folder / "file").exists()
    return folder


def test_a_folder_is_there_for_a_while(tmp_path: Path) -> None:
    with scratch_folder(PREFIX, parent=tmp_path) as made:
        (made / "file").touch()
        (made / "closed").mkdir(mode=0)

    assert not list(tmp_path.iterdir())


def test_by_default_it_is_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with scratch_folder(PREFIX) as made:
        assert made.parent == tmp_path


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, left: Path) -> None:
    seen: list[Path] = []

    with scratch_folder(PREFIX, parent=tmp_path, before_removal=seen.append) as made:
        assert list(tmp_path.iterdir()) == [made]

    assert seen == [left]


def test_what_cannot_be_rescued_is_kept(tmp_path: Path, left: Path) -> None:
    def fail(_left: Path) -> None:
        raise OSError(28, os.strerror(28))

    with scratch_folder(PREFIX, parent=tmp_path, before_removal=fail):
        pass

    assert (left / "file").exists()


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    with scratch_folder(PREFIX, parent=tmp_path) as one:
        with scratch_folder(PREFIX, parent=tmp_path) as other:
            assert other != one
        assert one.exists()


def test_what_no_process_made_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (tmp_path / "work-link_to_").symlink_to(elsewhere)
    (tmp_path / "work-long").symlink_to("x" * 300)  # longer than a name may be
    (tmp_path / "work-file0123").touch()
    (tmp_path / "work-mine0123").mkdir()  # it may be just made
    (tmp_path / "work-notes").mkdir()
    (tmp_path / "work-notes" / LOCK).touch()
    (tmp_path / "work-pipe0123").mkdir()
    os.mkfifo(tmp_path / "work-pipe0123" / LOCK)  # who opens it waits for a writer
    (tmp_path / "work-linked01").mkdir()
    (tmp_path / "work-linked01" / LOCK).symlink_to(elsewhere / LOCK)
    before = set(tmp_path.iterdir())

    with scratch_folder(PREFIX, parent=tmp_path):
        pass

    assert set(tmp_path.iterdir()) == before
    assert (elsewhere / LOCK).exists()


def test_what_was_left_without_a_lock_goes_after_a_day(tmp_path: Path) -> None:
    """Its process was killed when it had made the folder, or while it removed that."""
    old, young = tmp_path / "work-aaaaaaaa", tmp_path / "work-bbbbbbbb"
    for folder, hours in ((old, 25), (young, 23)):
        (folder / "inner").mkdir(parents=True)
        os.utime(folder, (time.time() - 3600 * hours,) * 2)

    with scratch_folder(PREFIX, parent=tmp_path):
        pass

    assert list(tmp_path.iterdir()) == [young]


def test_a_remover_that_is_killed_leaves_the_lock(
    tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left / "inner" / "file").parent.mkdir()
    (left / "inner" / "file").touch()
    monkeypatch.setattr("os.rmdir", _killed)

    with pytest.raises(KeyboardInterrupt), scratch_folder(PREFIX, parent=tmp_path):
        pass

    assert [path.name for path in left.iterdir() if path.is_file()] == [LOCK]


def _killed(*_arguments: object, **_named: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_left", [True, False])
def test_a_folder_is_removed_however_deep_it_is(
    tmp_path: Path, left: Path, *, is_left: bool
) -> None:
    """A path to the innermost would be longer than a system call takes."""
    with scratch_folder(PREFIX, parent=tmp_path) as made:
        if is_left:
            left.mkdir()
            (left / LOCK).touch()
        place = os.open(left if is_left else made, os.O_RDONLY)
        for _level in range(3000):
            os.mkdir("deeper", dir_fd=place)
            inner = os.open("deeper", os.O_RDONLY, dir_fd=place)
            os.close(place)
            place = inner
        os.close(place)

    with scratch_folder(PREFIX, parent=tmp_path):
        pass

    assert not list(tmp_path.iterdir())


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()

    with scratch_folder(PREFIX, parent=tmp_path) as made:
        (made / "inner").mkdir()
        (made / "inner" / "link").symlink_to(elsewhere)
        (made / "link").symlink_to(elsewhere)

    assert not made.exists()
    assert (elsewhere / "file").exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No such file"),
        scratch_folder(PREFIX, parent=tmp_path / "none"),
    ):
        pass
