import os
from pathlib import Path

import pytest

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.sql.database import database_file, open_database
from gemm_tuner.trust.ownership import check_owned


def test_a_new_database_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_database(f"sqlite:///{tmp_path}/new/store.sqlite3").dispose()
    finally:
        os.umask(before)
    file = tmp_path / "new" / "store.sqlite3"

    check_owned(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert database_file(f"sqlite:///{file}") == file


@pytest.mark.parametrize("name", ["folder", "folder/store.sqlite3"])
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_can_write_is_not_served(mode: int, name: str, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "store.sqlite3"
    file.parent.mkdir()
    file.touch()
    (tmp_path / name).chmod(mode | 0o100)

    with pytest.raises(InvalidSetting, match="chmod go-w"):
        check_owned(file)


def test_a_link_is_followed_to_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    file = tmp_path / "open" / "store.sqlite3"
    file.touch()
    file.chmod(0o666)
    (tmp_path / "link").symlink_to(file)

    with pytest.raises(InvalidSetting):
        check_owned(tmp_path / "link")


@pytest.mark.parametrize("way", ["open/link", "open/folder/key.pem", "link", "open/again"])
def test_a_link_that_others_can_replace_is_refused(way: str, tmp_path: Path) -> None:
    private, shared = tmp_path / "private", tmp_path / "open"
    for folder in (private, shared):
        folder.mkdir()
    (private / "key.pem").touch(mode=0o600)
    (shared / "link").symlink_to(private / "key.pem")
    (shared / "folder").symlink_to("../private")
    (shared / "again").symlink_to("link")
    (tmp_path / "link").symlink_to("open/link")
    check_owned(tmp_path / way)

    shared.chmod(0o777)

    with pytest.raises(InvalidSetting, match=f"{shared} can be changed by other users"):
        check_owned(tmp_path / way)


def test_links_that_lead_nowhere_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("missing/c")
    (tmp_path / "circle").symlink_to("circle")

    check_owned(tmp_path / "a")
    check_owned(tmp_path / "circle")


def test_a_folder_where_only_owners_remove_is_accepted_but_not_for_a_database(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o1777)
    file = tmp_path / "store.sqlite3"
    file.touch(mode=0o600)

    check_owned(file)
    with pytest.raises(InvalidSetting, match="a journal that would change the database"):
        check_owned(file, is_database=True)
