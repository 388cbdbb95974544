"""Find libraries in installed wheels."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

from gemm_tuner.errors import BaselineMissing


def find_in_wheel(wheel: str, library: str, *, install: str) -> Path:
    """Return a file of an installed wheel by its name.

    `install` is the command that installs the wheel.

    Raises:
        BaselineMissing: it is not installed.
    """
    try:
        installed = files(wheel) or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == library and (path := Path(str(file.locate())).resolve()).is_file():
            return path
    raise BaselineMissing(f"{wheel} is not installed ({library} was not found); run: {install}.")


def wheel_version(wheel: str, *, install: str) -> str:
    """Return the version of an installed wheel.

    Raises:
        BaselineMissing: it is not installed.
    """
    try:
        return version(wheel)
    except PackageNotFoundError:
        raise BaselineMissing(f"{wheel} is not installed; run: {install}.") from None


def installed_wheels(*wheels: str) -> list[str]:
    """Return those of some wheels that are installed, each with its version: `mkl 2026.2.0`."""
    found = []
    for wheel in wheels:
        with suppress(PackageNotFoundError):
            found.append(f"{wheel} {version(wheel)}")
    return found
