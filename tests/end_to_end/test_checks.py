"""`.ci/pytest` runs what failed once more, and hides no failure by that."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

pytestmark = pytest.mark.proof

SCRIPT = Path(__file__).parents[2] / ".ci" / "pytest"
SETTINGS = """
[tool.pytest.ini_options]
addopts = ["-p", "no:schemathesis", "-p", "no:hypothesispytest"]
filterwarnings = ["error"]
markers = ["proof: of the other stage"]
"""
FAILS_ONCE = """
from pathlib import Path

def test_that_fails_once():
    marker = Path("was_run")
    was_run = marker.exists()
    marker.touch()
    assert was_run
"""
LEAVES_A_FILE = """
import gc

def test_that_leaves_a_file():
    left = [open(__file__)]
    left.append(left)

def test_that_meets_it():
    gc.collect()
"""


@pytest.mark.parametrize(
    ("tests", "passes", "runs"),
    [(FAILS_ONCE, True, 2), (LEAVES_A_FILE, False, 1), ("def test():\n    assert 0", False, 2)],
    ids=["fails once", "meets what another left", "fails"],
)
def test_what_failed_runs_once_more(tmp_path: Path, tests: str, passes: bool, runs: int) -> None:  # noqa: FBT001 - a row
    folder, cache = tmp_path / ".ci", tmp_path / ".pytest_cache" / "v" / "cache"
    for one in (folder, cache):
        one.mkdir(parents=True)
    copy(SCRIPT, folder)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "test_planted.py").write_text(tests)
    earlier = ",\n".join(f'  "test_other.py::test_{number}": true' for number in range(4))
    (cache / "lastfailed").write_text(f"{{\n{earlier}\n}}")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    done = subprocess.run(
        [folder / "pytest", "not proof", "-n", "0"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode == 0) == passes, done.stdout
    assert done.stdout.count("test session starts") == runs, done.stdout
