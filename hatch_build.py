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
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
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
_SEAL_BYTES = sha256().digest_size
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
    _make_way(target)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise NotBuilt(f"{headers} has no Python.h; install the headers, such as python3-dev")
    folders = (headers, root / "templates" / "abi", root / "gemm_tuner" / "libraries" / "native")
    include = [word for folder in folders for word in ("-I", str(folder))]
    _compile([*_FLAGS, *include], root, "call", target, "-lpthread")


def build_finish(root: Path, target: Path) -> None:
    """Compile what computes where no kernel does in the checkout `root` to the library `target`.

    Raises:
        NotBuilt: it cannot be built here.
    """
    _make_way(target)
    _compile([*_FLAGS], root, "library", target)


def is_current(root: Path, name: str, target: Path) -> bool:
    """Return whether `target` is, to its last byte, what this script built of `name` of `root`."""
    if not (_is_possible() and target.is_file()):
        return False
    _sources, digest = _sources_and_digest(root, name)
    content = target.read_bytes()
    return sealed(content[:-_SEAL_BYTES], digest) == content


def sealed(library: bytes, digest: str) -> bytes:
    """Return a library built of sources with a digest, and where no loader looks, what tells so."""
    return library + sha256(Path(__file__).read_bytes() + digest.encode() + library).digest()


def _is_possible() -> bool:
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def _make_way(target: Path) -> None:
    target.unlink(missing_ok=True)
    if not _is_possible():
        raise NotBuilt("it is for Linux on x86-64")


def _sources_and_digest(root: Path, name: str) -> tuple[tuple[Path, ...], str]:
    resources = runpy.run_path(str(root / _RESOURCES))
    sources = resources[f"{name}_native_sources"]()
    return sources, resources["digest_of_sources"](sources)


def _compile(flags: list[str], root: Path, name: str, target: Path, *linked: str) -> None:
    """Build the sources `name` to `target`, which is there whole or not at all."""
    sources, digest = _sources_and_digest(root, name)
    units = [str(source) for source in sources if source.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        built = Path(folder) / target.name
        command = [*_compiler(), *flags, f'-DSOURCE_SHA256="{digest}"', *units]
        command += ["-o", str(built), *linked]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            raise NotBuilt(f"{shlex.join(command)} failed:\n{completed.stderr}")
        built.write_bytes(sealed(built.read_bytes(), digest))
        built.replace(target)


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
