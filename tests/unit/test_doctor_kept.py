"""What the doctor says of databases, keys, space and time."""

import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from samples import CPU, add_build, make_trial

from gemm_tuner.doctor import kept, tools
from gemm_tuner.domain.check import Check, Level
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.errors import BaselineMissing, InvalidSetting
from gemm_tuner.libraries import onednn
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.store.maintenance.examining import examine_database, shown_url
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys, Statement
from gemm_tuner.trust.keys import KeyPair

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a database with a kernel and its trial."""
    name = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(name)
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial())
    engine.dispose()
    return name


def change(url: str, statement: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute(statement)
        connection.commit()


def check_of(url: str) -> Check:
    return kept.check_store(url, shown_url(url), CPU)[0]


def test_a_database_is_counted_and_checked(url: str) -> None:
    check, found = kept.check_store(url, shown_url(url), CPU)

    assert check.level is Level.OK
    assert "problems: 1, trials: 1, verdicts for this CPU: 1" in check.seen
    assert check.figures["damages"] == 0
    assert found is not None
    assert found.contents is not None
    assert found.contents.newest_at == make_trial().created_at


def test_a_missing_database_is_not_made(tmp_path: Path) -> None:
    file = tmp_path / "none.sqlite3"

    check = check_of(f"sqlite:///{file}")

    assert check.level is Level.OK
    assert "there is none yet" in check.seen
    assert not file.exists()


def test_an_empty_database_is_whole(database_url: str) -> None:
    check = check_of(database_url)

    assert check.level is Level.OK
    assert "trials: 0" in check.seen


def test_damaged_rows_are_a_problem(url: str) -> None:
    change(url, "UPDATE artifacts SET compressed_binary = x'00'")

    check = check_of(url)

    assert check.level is Level.PROBLEM
    assert "1 damaged: artifacts " in check.seen
    assert "gemm-tuner db check" in check.advice


def test_an_older_schema_is_noted_and_stays(url: str) -> None:
    change(url, "UPDATE alembic_version SET version_num = 'access'")

    check = check_of(url)
    again = check_of(url)

    assert check.level is again.level is Level.NOTE
    assert "an older schema, access" in check.seen


def test_a_newer_schema_is_a_problem(url: str) -> None:
    change(url, "UPDATE alembic_version SET version_num = 'of_tomorrow'")

    check = check_of(url)

    assert check.level is Level.PROBLEM
    assert "update gemm-tuner" in check.advice


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_file_of_something_else_is_a_problem(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    file.write_bytes(content)

    check = check_of(f"sqlite:///{file}")

    assert check.level is Level.PROBLEM
    assert "cannot be read" in check.seen
    assert "--db" in check.advice
    assert file.read_bytes() == content


def test_a_database_that_others_can_change_is_a_problem(url: str) -> None:
    Path(url.removeprefix("sqlite:///")).chmod(0o666)

    check = check_of(url)

    assert check.level is Level.PROBLEM
    assert "can be changed by other users" in check.seen


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    assert check_of(f"sqlite:///{tmp_path}").level is Level.PROBLEM


def test_a_pipe_is_no_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    check = check_of(f"sqlite:///{tmp_path}/pipe")

    assert check.level is Level.PROBLEM
    assert "no plain file" in check.seen


def test_a_database_in_memory_is_none() -> None:
    assert examine_database("sqlite://", cpu_key="any", rows_of_each=1) is None


def test_a_mistyped_url_is_an_error() -> None:
    with pytest.raises(InvalidSetting, match="neither SQLite nor PostgreSQL"):
        examine_database("mysql://somewhere/else", cpu_key="any", rows_of_each=1)


def test_passwords_are_not_shown() -> None:
    assert "secret" not in shown_url("postgresql://user:secret@host/x?sslpassword=secret")


def test_keys_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert "none yet" in kept.check_keys(folder, tmp_path / "none.pem").seen
    MeasuringKeys(folder).attest(Statement.TRIAL, "any")
    signing = KeyPair.load_or_create(folder / "signing-key.pem")

    check = kept.check_keys(folder, folder / "signing-key.pem")

    assert check.level is Level.OK
    assert f"signing key {signing.key_id}" in check.seen
    assert f"{folder} has the mode 0700" in check.seen


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("measuring-key.pem", 0o644),
        ("signing-key.pem", 0o644),
        ("measuring-key.pem", 0o662),
        (".", 0o777),
    ],
)
def test_keys_that_others_can_read_or_change_are_a_problem(
    name: str, mode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    MeasuringKeys(folder).attest(Statement.TRIAL, "any")
    KeyPair.load_or_create(folder / "signing-key.pem")
    (folder / name).chmod(mode)

    check = kept.check_keys(folder, folder / "signing-key.pem")

    assert check.level is Level.PROBLEM
    assert "chmod" in check.advice


def test_a_folder_of_keys_that_is_none_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    check = kept.check_keys(tmp_path / "file" / "data", tmp_path / "none.pem")

    assert check.level is Level.PROBLEM
    assert "XDG_DATA_HOME" in check.advice


@pytest.mark.parametrize(
    ("free_mib", "level"), [(10_000, Level.OK), (500, Level.NOTE), (5, Level.PROBLEM)]
)
def test_little_space_is_told(
    free_mib: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free_mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    check = kept.check_space({"database": tmp_path / "not" / "there", "cache": tmp_path})

    assert check.level is level
    assert check.figures["database_free_bytes"] == free_mib << 20


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    check = kept.check_space({"cache": Path("/proc/none")})

    assert check.level is Level.PROBLEM
    assert check.advice.startswith("make /proc writable for the cache (")


@pytest.mark.parametrize(
    ("now", "newest", "source", "level"),
    [
        (NOW, None, "tsc", Level.OK),
        (NOW, NOW + timedelta(minutes=10), "kvm-clock", Level.OK),
        (NOW, NOW + timedelta(days=2), "tsc", Level.PROBLEM),
        (datetime(1970, 1, 2, tzinfo=UTC), None, "tsc", Level.PROBLEM),
        (NOW, None, "hpet", Level.NOTE),
        (NOW, None, None, Level.NOTE),
    ],
)
def test_a_clock_that_cannot_be_right_is_a_problem(
    now: datetime, newest: datetime | None, source: str | None, level: Level
) -> None:
    assert kept.check_time(now, newest, source).level is level


def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GEMM_TUNER_COMPILER", "gcc")

    check = tools.check_compiler(CPU)

    assert check.level is Level.PROBLEM
    assert "no usable compiler" in check.seen
    assert 'pip install "gemm-tuner[zig]"' in check.advice


def test_a_cache_that_others_can_write_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "builds").mkdir()
    (tmp_path / "builds").chmod(0o777)
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))

    check = tools.check_compiler(CPU)

    assert check.level is Level.PROBLEM
    assert "can be written by others" in check.seen
    assert "chmod 700" in check.advice


def test_a_compiler_that_compiles_nothing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_compiles", lambda _isa, _toolchain: False)

    check = tools.check_compiler(CPU)

    assert check.level is Level.PROBLEM
    assert "compiles nothing" in check.seen


def test_a_compiler_that_knows_the_flags_is_named() -> None:
    check = tools.check_compiler(CPU)

    assert check.level is Level.OK
    assert "knows the flags of all" in check.seen


def test_flags_that_a_compiler_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = tools._compiles
    lacking = frozenset({IsaFeature.AVX512F})
    monkeypatch.setattr(
        tools, "_compiles", lambda isa, toolchain: not isa & lacking and compiles(isa, toolchain)
    )
    cpu = replace(CPU, isa=CATALOG["avx512_f32"].isa)

    check = tools.check_compiler(cpu)

    assert check.level is Level.NOTE
    assert "has no flags for avx512f" in check.seen
    assert "avx512_f32" in check.seen


def test_baselines_are_named_with_their_versions() -> None:
    check = tools.check_baselines()

    assert "numpy " in check.seen
    assert check.figures["raced"]
    assert "numpy " in str(check.figures["raced for attention"])


def test_a_library_that_does_not_load_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise BaselineMissing("oneDNN does not load: libgomp is missing; install libgomp1.")

    monkeypatch.setattr(tools, "find_onednn", Path)
    monkeypatch.setattr(tools, "open_onednn", refuse)

    check = tools.check_baselines()

    assert check.level is Level.NOTE
    assert "libgomp is missing" in check.seen
    assert check.advice == "install libgomp1"


def test_a_missing_library_is_noted_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "installed_onednn", tuple)

    check = tools.check_baselines()

    assert check.level is Level.NOTE
    assert check.advice == 'run: pip install "gemm-tuner[onednn]"'
