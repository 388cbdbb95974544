"""Where the files that ship with the package are, in a checkout and in an installed wheel.

hatch_build.py runs this file alone, before anything is installed: it needs the standard library.
"""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """Return the folder of the C++ templates."""
    return _resource_dir("templates")


def tuning_db_dir() -> Path:
    """Return the folder of the records that ship with the package."""
    return _resource_dir("tuning_db")


def call_native_dir() -> Path:
    """Return the folder of the C sources of the call path."""
    return _PACKAGE / "runtime" / "native"


def library_native_dir() -> Path:
    """Return the folder of the C sources of what computes where no kernel does."""
    return _PACKAGE / "libraries" / "native"


def bench_native_dir() -> Path:
    """Return the folder of the C sources of timing loops and of the emulator."""
    return _PACKAGE / "bench" / "native"


def call_native_sources() -> tuple[Path, ...]:
    """Return the files that gemm_tuner/runtime/_native is built from."""
    own = sorted(call_native_dir().glob("*.[ch]"))
    return *own, library_native_dir() / "levels.h", templates_dir() / "abi" / "gemm_tuner.h"


def library_native_sources() -> tuple[Path, ...]:
    """Return the files that gemm_tuner/libraries/_finish is built from."""
    return tuple(sorted(library_native_dir().glob("*.[ch]")))


def digest_of_sources(sources: Iterable[Path]) -> str:
    """Return the hex sha256 of files with their names, which a library built from them carries."""
    digest = sha256()
    for source in sources:
        text = source.read_bytes()
        digest.update(f"{source.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _resource_dir(name: str) -> Path:
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name
