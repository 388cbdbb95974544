"""A script of the user's that runs models, run as Python would run it."""

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TextIO

import typer

from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.errors import InvalidSetting, MissingCapability

# fmt: off
Script = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="A Python script that runs models of PyTorch")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the script is given")]
# fmt: on


def check_script(script: Path, command: str) -> None:
    """Check that a command can run a script.

    Raises:
        MissingCapability: PyTorch is not installed.
        InvalidSetting: it is no file.
    """
    if find_spec("torch") is None:
        raise MissingCapability(f'{command} needs PyTorch: pip install "gemm-tuner[torch]".')
    if not script.is_file():
        raise InvalidSetting(
            f"script {str(script)!r} is no file; give the path of a Python script."
        )


def load_pytorch() -> None:
    """Import PyTorch; Ctrl-C meanwhile is answered after it, since a half import breaks others.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    with StopOnInterrupt(notice=b"Stopping when PyTorch is loaded.\n") as stop:
        import_module("gemm_tuner.torch")
    if stop.is_stopped():
        raise KeyboardInterrupt


def run_script(script: Path, arguments: list[str], *, is_aside: bool = False) -> int:
    """Run a script as Python would, and return 0, or 1 if it failed; Ctrl-C ends it.

    `is_aside` sends what it prints to stderr, so that stdout has nothing but our result.
    """
    given = sys.argv, sys.path[0], os.open(".", os.O_PATH), signal.getsignal(signal.SIGINT)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with _streams_of_its_own(is_aside=is_aside):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            told = end.code if isinstance(end.code, str) else f"exit code {_number(end.code)}"
            print_message(f"The script ended with {told}; what it computed until then counts.")
        return int(bool(end.code))
    except KeyboardInterrupt:
        print_message("The script was interrupted; what it computed until then counts.")
    except BaseException as error:  # noqa: BLE001 - the user's own
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        told = _first_line(error)
        print_message(
            f"The script failed at {place} with {type(error).__name__}: {told}; "
            "what it computed until then counts."
        )
        return 1
    finally:
        sys.argv, sys.path[0] = given[:2]
        os.chdir(given[2])
        os.close(given[2])
        if given[3] is not None:  # not one of C
            signal.signal(signal.SIGINT, given[3])
    return 0


def _number(code: object) -> object:
    return int(code) if isinstance(code, bool) else code


def _first_line(error: BaseException) -> str:
    """Return what an error of a script says first; it may fail to say it."""
    try:
        return next(iter(str(error).splitlines()), "")
    except Exception:  # noqa: BLE001 - the user's own
        return "a message that cannot be shown"


@contextmanager
def _streams_of_its_own(*, is_aside: bool) -> Iterator[None]:
    """Give a script streams that it may close or replace, and take back ours after it."""
    out, err = sys.stdout, sys.stderr
    saved = {number: os.dup(number) for number in _STANDARD if _is_open(number)}
    out.flush()
    if is_aside and len(saved) == len(_STANDARD):
        os.dup2(_STANDARD[1], _STANDARD[0])
    its_out, its_err = _twin(err if is_aside else out), _twin(err)
    try:
        with redirect_stdout(its_out), redirect_stderr(its_err):
            yield
    finally:
        for stream in (its_out, its_err):
            with suppress(ValueError, OSError):  # it closed it, or nobody reads it
                stream.flush()
        for number, copied in saved.items():
            os.dup2(copied, number)
            os.close(copied)


_STANDARD = (1, 2)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _twin(stream: TextIO) -> TextIO:
    """Return another stream to the same file, or the same where there is no file."""
    try:
        number = stream.fileno()
    except OSError:
        return stream
    return open(
        number,
        "w",
        buffering=1,
        encoding=stream.encoding,
        errors=stream.errors,
        closefd=False,
    )
