"""Compilers that can build kernels: gcc, clang, or the clang inside the `ziglang` wheel."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from gemm_tuner.errors import InvalidSetting, ToolchainMissing

COMPILER_VARIABLE = "GEMM_TUNER_COMPILER"

_PROBE_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """One compiler: what it is called in records, and the command that runs it as C++ or C."""

    name: str
    version: str
    command: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the name kept in records: `gcc 12.2.0`."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    executables: tuple[str, ...]
    version_arguments: tuple[str, ...]
    minimum: tuple[int, ...]


# In the order of preference: what the system has comes before the wheel.
_KINDS = {
    "gcc": _Kind(
        executables=("g++", "g++-14", "g++-13", "g++-12", "g++-11"),
        version_arguments=("-dumpfullversion",),
        minimum=(11,),
    ),
    "clang": _Kind(
        executables=("clang++", *(f"clang++-{major}" for major in range(22, 13, -1))),
        version_arguments=("-dumpversion",),
        minimum=(14,),
    ),
    "zig": _Kind(executables=("zig",), version_arguments=("version",), minimum=(0, 13)),
}


def find_toolchain(choice: str | None = None) -> Toolchain:
    """Return the first usable compiler, or the one chosen by name or by `GEMM_TUNER_COMPILER`.

    Args:
        choice: `gcc`, `clang` or `zig`; None takes the environment variable, then any.

    Raises:
        InvalidSetting: the choice is none of the three.
        ToolchainMissing: the chosen compiler, or any, is missing or too old.
    """
    name = choice or os.environ.get(COMPILER_VARIABLE)
    if name is not None and name not in _KINDS:
        raise InvalidSetting(f"compiler {name!r} is not known; use gcc, clang or zig.")
    for wanted in [name] if name else list(_KINDS):
        toolchain = _probe(wanted, os.environ.get("PATH", ""))
        if toolchain is not None:
            return toolchain
    looked_for = name or "gcc >= 11, clang >= 14 or zig"
    raise ToolchainMissing(
        f"no usable compiler: {looked_for} was not found; "
        'install one, or run: pip install "gemm-tuner[zig]".'
    )


@cache
def _probe(name: str, path: str) -> Toolchain | None:
    kind = _KINDS[name]
    for executable in kind.executables:
        command = _zig_command(path) if name == "zig" else shutil.which(executable, path=path)
        version = command and _version_of(command, kind.version_arguments)
        if command and version and _numbers(version) >= kind.minimum:
            arguments = (command, "c++") if name == "zig" else (command,)
            return Toolchain(name=name, version=version, command=arguments)
    return None


def _zig_command(path: str) -> str | None:
    spec = find_spec("ziglang")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        executable = Path(location) / "zig"
        if executable.is_file():
            return str(executable)
    return shutil.which("zig", path=path)


def _version_of(command: str, arguments: tuple[str, ...]) -> str | None:
    try:
        answer = subprocess.run(
            [command, *arguments],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
