"""The script that enters the sandbox, as this user and as one without rights."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from restricted import skip_where_linux_refuses

from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.sandbox import confine, enter

NOBODY = 65534
# That of the system, which every user can run.
PYTHON = shutil.which("python3", path="/usr/bin")
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]

needs_python = pytest.mark.skipif(
    PYTHON is None or os.getuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root, setpriv and a Python in /usr/bin",
)


def as_nobody(level: SandboxLevel, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the shell in a sandbox, as a user who owns `folder` and nothing else."""
    os.chown(folder, NOBODY, NOBODY)
    copy = folder / "enter.py"
    shutil.copyfile(enter.__file__, copy)
    paths, links = confine._paths([*confine._SYSTEM])
    policy = {
        "level": level.value,
        "limits": {"CORE": 0, "NPROC": 24, "FSIZE": 1 << 20},
        "visible": paths,
        "links": links,
        "writable": [str(folder)],
        "hidden": [],
        "own_tmp_bytes": 1 << 20,
    }
    if level is not SandboxLevel.NAMESPACES:
        policy["limits"] = {"CORE": 0, "FSIZE": 1 << 20}
    assert PYTHON is not None
    sandbox = [PYTHON, "-I", "-S", str(copy), enter.written(policy), "/bin/sh", "-c", script]
    return subprocess.run(
        [*AS_NOBODY, *sandbox], cwd="/", capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that another user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-test-") as name:
        Path(name).chmod(0o755)
        (Path(name) / "own").mkdir()
        yield Path(name) / "own"


@needs_python
@pytest.mark.parametrize("level", [SandboxLevel.NAMESPACES, SandboxLevel.LANDLOCK])
def test_a_user_without_rights_is_shut_off_too(level: SandboxLevel, folder: Path) -> None:
    key = folder.parent / "key"
    key.write_text("secret")
    key.chmod(0o644)
    script = f"cat {key}; echo x > /var/tmp/planted; cat /proc/{os.getpid()}/environ;"

    done = as_nobody(level, f"{script} echo y > {folder}/mine; cat {folder}/mine", folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert done.stdout == "y\n"
    assert not Path("/var/tmp/planted").exists()  # noqa: S108 - where everyone may write


@needs_python
def test_processes_without_end_are_refused(folder: Path) -> None:
    script = "i=0; while [ $i -lt 100 ]; do sleep 9 & i=$((i + 1)); done; echo all"

    done = as_nobody(SandboxLevel.NAMESPACES, script, folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert "all" not in done.stdout
    assert "annot fork" in done.stderr


@needs_python
def test_a_private_temporary_folder_has_a_size(folder: Path) -> None:
    script = "for i in 1 2 3; do head -c 1000000 /dev/zero > /tmp/$i; done; cat /tmp/? | wc -c"

    done = as_nobody(SandboxLevel.NAMESPACES, script, folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert int(done.stdout) <= 1 << 20
    assert "No space left" in done.stderr


@needs_python
@pytest.mark.parametrize("level", [one for one in SandboxLevel if one is not SandboxLevel.NONE])
@pytest.mark.parametrize(
    ("script", "status"), [("exit 7", 7), ("kill -9 $$", -9), ("kill $$", -15)]
)
def test_it_ends_as_its_command_ends(
    level: SandboxLevel, script: str, status: int, folder: Path
) -> None:
    done = as_nobody(level, script, folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert done.returncode == status


@needs_python
def test_what_cannot_be_run_is_told() -> None:
    policy = enter.written({"level": "limits", "limits": {}})
    command = [str(PYTHON), "-I", "-S", enter.__file__, policy, "/nonexistent/compiler"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    told = confine.why_refused(done.returncode, done.stderr)
    assert told == "/nonexistent/compiler: No such file or directory"
