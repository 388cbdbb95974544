"""Folders to work in for a while, and what killed processes leave of them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemm_tuner.scratch import scratch_folder

PREFIX = "work-"


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
    (elsewhere / ".lock").touch()
    (tmp_path / "work-link").symlink_to(elsewhere)
    (tmp_path / "work-long").symlink_to("x" * 300)  # longer than a name may be
    (tmp_path / "work-file").touch()
    (tmp_path / "work-mine").mkdir()
    (tmp_path / "work-pipe").mkdir()
    os.mkfifo(tmp_path / "work-pipe" / ".lock")  # who opens it waits for a writer
    (tmp_path / "work-linked").mkdir()
    (tmp_path / "work-linked" / ".lock").symlink_to(elsewhere / ".lock")
    before = set(tmp_path.iterdir())

    with scratch_folder(PREFIX, parent=tmp_path):
        pass

    assert set(tmp_path.iterdir()) == before
    assert (elsewhere / ".lock").exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No such file"),
        scratch_folder(PREFIX, parent=tmp_path / "none"),
    ):
        pass
