"""The folder that native code is loaded from: it belongs to its user alone."""

from pathlib import Path

import pytest

from gemm_tuner.build.cache import build_cache_dir, write_atomically
from gemm_tuner.errors import StoreFailed


def test_a_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path / "cache"))

    folder = build_cache_dir()

    assert folder.stat().st_mode & 0o777 == 0o700
    assert build_cache_dir() == folder


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_builds_that_others_can_write_are_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    (tmp_path / "builds").mkdir()
    (tmp_path / "builds").chmod(mode)

    with pytest.raises(StoreFailed, match="can be written by others"):
        build_cache_dir()


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()

    with pytest.raises(StoreFailed, match="cannot be written"):
        write_atomically(target, b"content")

    assert list(tmp_path.iterdir()) == [target]
