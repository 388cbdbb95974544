"""A script of the user's that runs models, run as Python would run it."""

import runpy
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.output import print_message
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


def run_script(script: Path, arguments: list[str]) -> int:
    """Run a script as Python would, and return 0, or 1 if it failed; Ctrl-C ends it."""
    given = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print_message(end.code)
        return int(bool(end.code))
    except KeyboardInterrupt:
        print_message("The script was interrupted; what it computed until then counts.")
    except Exception as error:  # noqa: BLE001 - the user's own
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        print_message(
            f"The script failed at {place} with {type(error).__name__}: {error}; "
            "what it computed until then counts."
        )
        return 1
    finally:
        sys.argv, sys.path[0] = given
    return 0
