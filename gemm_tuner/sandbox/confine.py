"""How commands are put into the sandbox, and how good a sandbox there is here."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from platformdirs import user_config_path, user_data_path

from gemm_tuner.domain.sandbox import Sandbox, SandboxLevel
from gemm_tuner.errors import InvalidSetting, SandboxMissing
from gemm_tuner.sandbox import enter

SANDBOX_VARIABLE = "GEMM_TUNER_SANDBOX"

_CHOICES = ("auto", "require", "off")
_BEST_FIRST = (SandboxLevel.NAMESPACES, SandboxLevel.LANDLOCK, SandboxLevel.LIMITS)
_ENTER = Path(enter.__file__)
# Imported, it is compiled once and not at each start.
_START = f"import sys; sys.path.append({str(_ENTER.parent)!r}); import enter; enter.start()"
_PACKAGE = _ENTER.parents[1]
_PROBE_TIMEOUT_S = 30
_OWN_TMP_BYTES = 2 << 30

# What compilers, libraries and Python read of a system: programs, and how to find libraries.
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/OpenCL"),
)
_FOLDERS_OF_PACKAGES = ("site-packages", "dist-packages")
_ADDED = "/opt"  # some users are at home there
# Settings that say why Linux refuses namespaces: the file, the value, what it means.
_REASONS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0"),
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "kernel.apparmor_restrict_unprivileged_userns is 1",
    ),
)


def look_at_sandbox() -> Sandbox:
    """Return the level that compilers and trials reach here, and why it is no better.

    Raises:
        InvalidSetting: GEMM_TUNER_SANDBOX has none of its values.
    """
    choice = os.environ.get(SANDBOX_VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise InvalidSetting(
            f"{SANDBOX_VARIABLE} is {choice!r}; set it to one of {', '.join(_CHOICES)}."
        )
    if choice == "off":
        return Sandbox(level=SandboxLevel.NONE, why=f"{SANDBOX_VARIABLE} is off")
    return _best()


def needed_sandbox() -> Sandbox:
    """Return the level that is reached here, if it suffices.

    Raises:
        InvalidSetting: GEMM_TUNER_SANDBOX has none of its values.
        SandboxMissing: it is `require`, and files and network cannot be shut off here.
    """
    reached = look_at_sandbox()
    if os.environ.get(SANDBOX_VARIABLE) == "require" and not reached.level.hides_files:
        raise SandboxMissing(
            f"{SANDBOX_VARIABLE} is require, but kernels cannot be shut off here: only "
            f"{reached.text}; permit user namespaces, use Linux 6.7 or newer with Landlock, "
            f"or set {SANDBOX_VARIABLE}=auto."
        )
    return reached


def confined(
    command: Iterable[str],
    *,
    limits: Mapping[str, int],
    visible: Iterable[Path | str] = (),
    writable: Iterable[Path | str] = (),
) -> list[str]:
    """Return what runs a command in the best sandbox there is here.

    Args:
        command: the program with its arguments.
        limits: resource limits by their names, without RLIMIT_. NPROC counts the processes of the
            sandbox, and is not set where it would count all those of the user.
        visible: files and folders that it reads, besides those of the system and of Python.
        writable: folders that it writes.

    Raises:
        InvalidSetting: GEMM_TUNER_SANDBOX has none of its values.
        SandboxMissing: it is `require`, and files and network cannot be shut off here.
    """
    level = needed_sandbox().level
    if level is SandboxLevel.NONE:
        return list(command)
    return _in_sandbox(level, list(command), limits=limits, visible=visible, writable=writable)


def why_refused(status: int, diagnostics: str) -> str | None:
    """Return why a confined command could not be run, None if it ran."""
    if status != enter.REFUSED:
        return None
    lines = [line for line in diagnostics.splitlines() if line.startswith(enter.PREFIX)]
    return lines[-1].removeprefix(enter.PREFIX) if lines else None


def _in_sandbox(
    level: SandboxLevel,
    command: list[str],
    *,
    limits: Mapping[str, int],
    visible: Iterable[Path | str] = (),
    writable: Iterable[Path | str] = (),
) -> list[str]:
    paths, links = _paths(
        [
            *_SYSTEM,
            _ADDED,
            *_of_python(),
            *_of_program(command[0]),
            *(one for one in visible if one),
        ]
    )
    policy = {
        "level": level.value,
        "limits": {
            name: most
            for name, most in limits.items()
            if name != "NPROC" or level is SandboxLevel.NAMESPACES
        },
        "visible": paths,
        "links": links,
        "writable": [os.path.realpath(path) for path in writable],
        "hidden": [str(path) for path in _secret_folders()],
        "own_tmp_bytes": _OWN_TMP_BYTES,
    }
    return [sys.executable, "-I", "-S", "-c", _START, enter.written(policy), *command]


@cache
def _best() -> Sandbox:
    """Return the best level in which Python starts here."""
    why = ""
    for level in _BEST_FIRST:
        command = _in_sandbox(level, [sys.executable, "-I", "-S", "-c", ""], limits={"CORE": 0})
        try:
            tried = subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
            failure = why_refused(tried.returncode, tried.stderr) or tried.stderr.strip()[-200:]
            is_reached = tried.returncode == 0
        except (OSError, subprocess.TimeoutExpired) as error:
            failure, is_reached = str(error), False
        if is_reached:
            return Sandbox(level=level, why=why)
        why = why or _explained(failure or f"status {tried.returncode}")
    return Sandbox(level=SandboxLevel.NONE, why=why)


def _explained(failure: str) -> str:
    for file, value, reason in _REASONS:
        with suppress(OSError):
            if Path(file).read_text().strip() == value:
                return f"{failure}: {reason}"
    with suppress(OSError):
        if "Seccomp:\t2" in Path("/proc/self/status").read_text():
            return f"{failure}: a filter of system calls, as containers have, may refuse it"
    return failure


def _paths(wanted: Iterable[Path | str]) -> tuple[list[str], dict[str, str]]:
    """Return what to show, each once, and links to that.

    A folder that has secrets below it, or is one's own in there, is left out: of `/tmp`, where a
    script of the user may lie, only what else is wanted below it is shown.
    """
    real: set[str] = set()
    links: dict[str, str] = {}
    own = [*_homes(), *enter.OWN]
    for path in dict.fromkeys(map(os.path.abspath, wanted)):
        target = os.path.realpath(path)
        must_stay_hidden = any(_is_in(folder, target) for folder in own)
        if not Path(target).exists() or (must_stay_hidden and path not in _SYSTEM):
            continue
        real.add(target)
        if target != path:
            links[path] = target
    outer: list[str] = []
    for path in sorted(real, key=lambda one: f"{one}/"):  # what is below a folder follows it
        if not outer or not _is_in(path, outer[-1]):
            outer.append(path)
    return outer, links


def _is_in(path: str, folder: str) -> bool:
    """Return whether a path is a folder or below it; each compiler waits for many such answers."""
    return folder == "/" or f"{path}/".startswith(f"{folder}/")


def _of_python() -> list[Path | str]:
    """Return where Python, this package and other packages are, with their shared libraries.

    Wheels keep those in `lib`, two folders above `site-packages`, which is not below a prefix where
    packages were installed for a user or another environment is on the path.
    """
    folders = [Path(folder) for folder in filter(None, sys.path)]
    libraries = [one.parent.parent for one in folders if one.name in _FOLDERS_OF_PACKAGES]
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, *folders, *libraries, _PACKAGE]


def _of_program(program: str) -> list[Path | str]:
    """Return where a program is, with the rest of what it was installed with."""
    found = Path(os.path.realpath(program))
    if not found.is_absolute() or not found.is_file():
        return []
    folder = found.parent
    return [folder, folder.parent] if folder.name == "bin" else [folder]


def _homes() -> tuple[str, ...]:
    """Return the user's home folders: of the environment, and of the system's list."""
    homes = {os.path.expanduser("~")}  # noqa: PTH111 - it does not raise
    with suppress(KeyError):
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    return tuple(os.path.realpath(home) for home in homes if home not in {"", "/"})


def _secret_folders() -> tuple[Path, ...]:
    """Return the folders of keys, databases and settings."""
    names = (user_data_path("gemm-tuner"), user_config_path("gemm-tuner"))
    return tuple(Path(os.path.realpath(name)) for name in names)
