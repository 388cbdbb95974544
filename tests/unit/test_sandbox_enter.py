"""The script that enters the sandbox, as this user and as one without rights."""

import os
import shutil
import subprocess
import sys
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


REACHING = """
import ctypes, socket
def succeeds(family):
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except PermissionError:
        return False
    return True
families = {family for family in socket.AddressFamily if succeeds(family)}
libc = ctypes.CDLL(None)
user_namespace, clone3, io_uring = 0x10000000, 435, 425
print(families, libc.unshare(user_namespace), libc.syscall(56, user_namespace | 17, 0, 0, 0, 0),
      libc.syscall(clone3, None, 0), libc.syscall(io_uring, 1, None))
"""


@needs_python
@pytest.mark.parametrize("level", [one for one in SandboxLevel if one is not SandboxLevel.NONE])
def test_no_socket_and_no_namespace_is_made(level: SandboxLevel, folder: Path) -> None:
    """Sockets of a hypervisor know no namespace of networks, and those of files no Landlock."""
    done = as_nobody(level, f"{PYTHON} -I -S - <<'END'\n{REACHING}\nEND", folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert done.stdout == "set() -1 -1 -1 -1\n", done.stderr


@needs_python
def test_the_first_process_of_the_sandbox_cannot_be_traced(folder: Path) -> None:
    """Who traces it could let it forget to end with the process that waits for it."""
    seize, first = 0x4206, 1
    script = f"import ctypes; print(ctypes.CDLL(None).ptrace({seize}, {first}, 0, 0))"

    done = as_nobody(SandboxLevel.NAMESPACES, f"{PYTHON} -I -S -c '{script}'", folder)

    if done.returncode == enter.REFUSED:
        skip_where_linux_refuses(done.stderr)
    assert done.stdout == "-1\n", done.stderr


def test_landlock_is_not_said_to_hide_what_it_shows() -> None:
    policy = enter.written(
        {
            "level": "landlock",
            "limits": {},
            "visible": ["/usr"],
            "writable": [],
            "hidden": ["/usr/local/share/gemm-tuner"],
        }
    )
    command = [sys.executable, "-I", "-S", enter.__file__, policy, "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    told = confine.why_refused(done.returncode, done.stderr) or ""
    if "cannot hide" not in told:
        skip_where_linux_refuses(told)


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
