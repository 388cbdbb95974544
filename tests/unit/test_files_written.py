"""A file that a user named is written whole, or stays as it was."""

import os
import stat
import threading
from pathlib import Path

import pytest

from gemm_tuner.files import written_whole


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("before")

    def write() -> None:
        with written_whole(path) as file:
            file.write(b"half of")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()

    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)

    with written_whole(link) as file:
        file.write(b"after")

    assert path.read_text() == "after"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()

    with written_whole(tmp_path / "new"):
        pass

    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_pipe_is_written_as_it_is_and_one_that_nobody_reads_is_not_waited_for(
    tmp_path: Path,
) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"), written_whole(pipe):
        pass

    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    content = bytes(1 << 20)  # more than a pipe holds
    for _ in range(1000):
        try:
            with written_whole(pipe) as file:
                file.write(content)
            break
        except OSError:  # the reader has not begun
            threading.Event().wait(0.01)
    reader.join()
    assert read == [content]
    assert pipe.is_fifo()


def test_an_open_pipe_is_written_by_its_name() -> None:
    read, written = os.pipe()
    with written_whole(Path(f"/dev/fd/{written}")) as file:
        file.write(b"records")
    os.close(written)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"records"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"), written_whole(tmp_path):
        pass


def test_an_open_file_is_written_from_where_it_stands(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    with path.open("w+b", buffering=0) as log:
        link.symlink_to(f"/proc/self/fd/{log.fileno()}")
        log.write(b"first\n")
        for name in (Path(f"/dev/fd/{log.fileno()}"), link):
            with written_whole(name) as file:
                file.write(b"records\n")
        path.unlink()
        with written_whole(link) as file:
            file.write(b"more\n")
        log.write(b"last\n")

        assert os.pread(log.fileno(), 100, 0) == b"first\nrecords\nrecords\nmore\nlast\n"
    assert list(tmp_path.iterdir()) == [link], "none takes the place of one that is removed"


def test_what_was_there_stays_where_output_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with path.open("ab") as log, written_whole(Path(f"/dev/fd/{log.fileno()}")) as file:
        file.write(b"records\n")
    assert path.read_bytes() == b"before\nrecords\n"


def test_links_in_a_circle_are_refused_by_the_name_that_was_given(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for name in (loop, loop / "file"):
        with pytest.raises(OSError, match=f"Too many levels .*{name}'"), written_whole(name):
            pass
    assert loop.is_symlink()


def test_a_file_in_no_folder_is_refused_by_the_name_that_was_given(tmp_path: Path) -> None:
    name = tmp_path / "none" / "file"
    with pytest.raises(OSError, match=f"No such file .*{name}'"), written_whole(name):
        pass


def test_a_name_with_a_null_byte_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path / "a\0b", tmp_path / "a\0b" / "file"):
        with pytest.raises(OSError, match="no name of a file has a null byte"), written_whole(name):
            pass
    assert list(tmp_path.iterdir()) == []


def test_what_takes_the_place_of_a_program_sets_no_user(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.touch()
    path.chmod(0o6751)

    with written_whole(path) as file:
        file.write(b"another")

    assert stat.S_IMODE(path.stat().st_mode) == 0o751
