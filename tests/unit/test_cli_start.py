"""What a command loads before it works, and that it prints where the terminal is poor."""

import os
import subprocess
import sys
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TextIO

import pytest
import typer

from gemm_tuner.cli.main import COMMANDS, PANELS, module_of
from gemm_tuner.cli.terminal import output
from gemm_tuner.domain.units import time_text
from gemm_tuner.store.sql.database import open_database

# Each takes longer to load than `--help` may take in all.
HEAVY = {
    "alembic", "asyncio", "cpuinfo", "cryptography", "fastapi", "httpx", "jinja2", "numpy",
    "matplotlib", "ml_dtypes", "pydantic", "rich.progress", "sqlalchemy", "uvicorn",
}  # fmt: skip
_REPORT = """
import sys
from gemm_tuner.cli.main import run
code = run(sys.argv[1:])
print(code, *sys.modules, file=sys.stderr)
"""
_DASK_AFTER_EACH = """
import sys
from gemm_tuner.cli.main import run
for command in sys.argv[1:]:
    assert run([command, "--help"]) == 0
    print(command, *sys.modules.keys() & {"dask", "distributed"}, file=sys.stderr)
"""


def _modules_after(*arguments: str, first: str = "") -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", first + _REPORT, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split()[1:])


def _run(*arguments: str, encoding: str = "utf-8", shell: str = "") -> tuple[str, str, int]:
    command = [sys.executable, "-m", "gemm_tuner", *arguments]
    if shell:
        command = ["bash", "-c", f'set -o pipefail; "$@" {shell}', "bash", *command]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    return done.stdout.decode(encoding), done.stderr.decode(encoding), done.returncode


def test_the_help_loads_nothing_that_takes_long() -> None:
    assert not _modules_after("--help") & HEAVY


def test_a_question_to_the_database_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    modules = _modules_after("resolve", "8", "8", "8", "--db", url)

    assert not modules & (HEAVY - {"pydantic", "asyncio", "sqlalchemy"})  # typer has pydantic
    assert not modules & {"rich", "gemm_tuner.cli.reports.means", "gemm_tuner.space.axes"}
    assert not {"gemm_tuner.bench", "gemm_tuner.build", "gemm_tuner.tuning"} & modules


@pytest.mark.parametrize(
    "model", ["gemm_tuner.store.wire.record.WireRecord", "gemm_tuner.trust.payload.VerdictPayload"]
)
def test_no_model_is_built_before_it_is_used(model: str) -> None:
    module, _dot, name = model.rpartition(".")
    program = f"from {module} import {name}; print({name}.__pydantic_complete__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert done.stdout == b"False\n"


def test_commands_for_a_fleet_load_dask_only_for_one() -> None:
    commands = ["worker", "sweep", "dispatch"]
    done = subprocess.run(
        [sys.executable, "-c", _DASK_AFTER_EACH, *commands],
        capture_output=True,
        text=True,
        check=True,
    )

    # The first that is followed by a name loads it.
    assert done.stderr.splitlines() == commands


def test_a_service_loads_what_estimates_a_job_when_it_is_asked() -> None:
    modules = _modules_after("serve", "--help", first="import gemm_tuner_service.app")

    assert "gemm_tuner_service.app" in modules
    assert not modules & {"numpy", "matplotlib", "gemm_tuner.space.candidates"}


def test_importing_the_package_loads_nothing() -> None:
    program = "import sys, gemm_tuner; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    loaded = set(done.stdout.decode().split())
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("gemm_tuner.")} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_says_of_each_command_what_its_module_says(name: str) -> None:
    attribute = name.replace("-", "_")

    command = getattr(import_module(module_of(name)), attribute)

    if isinstance(command, typer.Typer):
        assert command.info.help == COMMANDS[name]
    else:
        assert (command.__doc__ or "").partition("\n")[0] == f"{COMMANDS[name]}."


def test_the_help_has_each_command_in_one_group() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    _out, err, code = _run("tune-shortlst")

    assert code == 2
    assert "tune-shortlist" in err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_the_help_is_printed_in_any_encoding(encoding: str) -> None:
    out, err, code = _run("--help", encoding=encoding)

    assert code == 0
    assert err == ""
    assert "tune-shortlist" in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (time_text(1500), b"1.5 us"),
        ("2 \xd7 3 ≥ 1, ±5 % …", b"2 x 3 >= 1, +-5 % ..."),
        ("layer 你好 \udcff", rb"layer \u4f60\u597d \udcff"),
    ],
)
def test_what_an_encoding_lacks_is_spelled(text: str, expected: bytes) -> None:
    written = BytesIO()
    stream: TextIO = TextIOWrapper(written, encoding="ascii")

    output.make_printable(stream)
    stream.write(text)
    stream.flush()

    assert written.getvalue() == expected


@pytest.mark.parametrize(
    ("arguments", "shell"),
    [
        *((["cpu"], shell) for shell in ("| head -1", "| true", ">&-", "2>&-", ">/dev/full")),
        *((["cpu", "--json"], shell) for shell in ("| true", ">/dev/full")),
        *((["--help"], shell) for shell in ("| true", ">/dev/full")),
    ],
)
def test_a_reader_that_leaves_sees_no_traceback(arguments: list[str], shell: str) -> None:
    _out, err, code = _run(*arguments, shell=shell)

    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert err.count("\n") <= 1
    assert code in {0, 1, 3}
