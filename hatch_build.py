"""Build the C extensions, where there are a compiler and Python's headers.

gemm_tuner/runtime/_native is the call path: without it, kernels are called through ctypes.
gemm_tuner/libraries/_finish is the pass after the product of a library: without it, NumPy does it;
and the product in a fixed order, which nothing else computes.
Hatchling runs this for each wheel and editable install, and leaves what was built of the same
sources by this script as it is, unless CC names a compiler. Run it by hand after a change of
gemm_tuner/runtime/native or gemm_tuner/libraries/native.
"""

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
TARGET = Path("gemm_tuner/runtime/_native.abi3.so")
FINISH = Path("gemm_tuner/libraries/_finish.so")
TAG = "cp311-abi3-linux_x86_64"

_RESOURCES = Path("gemm_tuner/resources.py")
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
_COMPILERS = ("cc", "gcc", "clang", "zig cc", "python-zig cc")
# Others compile for any CPU, and check nothing at run time, unless they are asked to.
_ZIG_FLAGS = ("-mcpu=baseline", "-fno-sanitize=undefined")


class NotBuilt(Exception):
    """There is no compiler, no header, or the compiler refused a source."""


def build_native(root: Path, target: Path) -> None:
    """Compile the sources of the checkout `root` to the library `target`.

    Raises:
        NotBuilt: it cannot be built here.
    """
    target.unlink(missing_ok=True)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NotBuilt("it is for Linux on x86-64")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise NotBuilt(f"{headers} has no Python.h; install the headers, such as python3-dev")
    folders = (headers, root / "templates" / "abi", root / "gemm_tuner" / "libraries" / "native")
    include = [word for folder in folders for word in ("-I", str(folder))]
    _run([*_compiler(), *_FLAGS, *include, *_sources(root, "call"), "-o", str(target), "-lpthread"])


def build_finish(root: Path, target: Path) -> None:
    """Compile what computes where no kernel does in the checkout `root` to the library `target`.

    Raises:
        NotBuilt: it cannot be built here.
    """
    target.unlink(missing_ok=True)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NotBuilt("it is for Linux on x86-64")
    _run([*_compiler(), *_FLAGS, *_sources(root, "library"), "-o", str(target)])


def is_current(root: Path, name: str, target: Path) -> bool:
    """Return whether `target` was built by this script of the sources `name` of `root`."""
    if not target.is_file() or target.stat().st_mtime <= Path(__file__).stat().st_mtime:
        return False
    _sources, digest = _sources_and_digest(root, name)
    return digest.encode() in target.read_bytes()


def _sources_and_digest(root: Path, name: str) -> tuple[tuple[Path, ...], str]:
    resources = runpy.run_path(str(root / _RESOURCES))
    sources = resources[f"{name}_native_sources"]()
    return sources, resources["digest_of_sources"](sources)


def _sources(root: Path, name: str) -> list[str]:
    """Return the arguments that name the sources, with the digest that the library shall carry."""
    sources, digest = _sources_and_digest(root, name)
    units = [str(source) for source in sources if source.suffix == ".c"]
    return [f'-DSOURCE_SHA256="{digest}"', *units]


def _run(command: list[str]) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise NotBuilt(f"{shlex.join(command)} failed:\n{completed.stderr}")


def _compiler() -> list[str]:
    for choice in (os.environ.get("CC", ""), *_COMPILERS):
        words = shlex.split(choice)
        if words and shutil.which(words[0]):
            is_zig = any("zig" in Path(word).name for word in words)
            return [*words, *(_ZIG_FLAGS if is_zig else ())]
    raise NotBuilt(f"none of {', '.join(_COMPILERS)} is on PATH, and CC names no compiler")


class NativeHook(BuildHookInterface):
    """Puts the library into the checkout and the wheel; a wheel with it is for one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the libraries that are not there, or say why not."""
        root = Path(self.root)
        try:
            with ThreadPoolExecutor() as pool:
                builds = [
                    pool.submit(build, root, target)
                    for name, target, build in (
                        ("call", root / TARGET, build_native),
                        ("library", root / FINISH, build_finish),
                    )
                    if "CC" in os.environ or not is_current(root, name, target)
                ]
                for build_of_one in builds:
                    build_of_one.result()
        except NotBuilt as reason:
            self.app.display_warning(f"Kernels will be called through ctypes, not C: {reason}.")
            return
        build_data["artifacts"] += [str(TARGET), str(FINISH)]
        build_data["pure_python"] = False
        build_data["tag"] = TAG


if __name__ == "__main__":
    build_native(ROOT, ROOT / TARGET)
    build_finish(ROOT, ROOT / FINISH)
