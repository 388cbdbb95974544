"""Where the files that ship with the package are, in a checkout and in an installed wheel."""

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
    """Return the folder of the C source of the pass after a library's product."""
    return _PACKAGE / "libraries" / "native"


def bench_native_dir() -> Path:
    """Return the folder of the C sources of timing loops and of the emulator."""
    return _PACKAGE / "bench" / "native"


def _resource_dir(name: str) -> Path:
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name
