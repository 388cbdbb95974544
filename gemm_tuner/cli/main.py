"""The entry of the command line: its commands, its exit codes and how it fails."""

import gc
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gemm_tuner.cli.terminal.output import make_printable, print_message
from gemm_tuner.domain.rows import MAX_DIMENSION
from gemm_tuner.errors import (
    GemmTunerError,
    InvalidInput,
    InvalidProblem,
    InvalidSetting,
    MissingCapability,
    ServiceFailed,
    StoreFailed,
)

_LOG = logging.getLogger(__name__)
_NEGATIVE_NUMBER = re.compile(r"-\d.*")
_REPORT_AT = "the issue tracker of gemm-tuner"

ANSWER_IS_NO = 1
WRONG_USAGE = 2
SOMETHING_IS_MISSING = 3
INTERRUPTED = 130

# A command is the function or group of its name in the module of its name: `cli/cpu.py` has `cpu`.
# fmt: off
COMMANDS = {
    "quickstart":     "Tune three real layers against oneDNN, serve them, fetch a kernel and "
                      "call it",
    "cpu":            "Print the detected CPU, and which kernel families can run on it; or where "
                      "threads run",
    "doctor":         "Check that this machine measures well and has what tuning needs; exit 1 if "
                      "not",
    "sweep":          "Tune a layer, or those of a file, and print the autotuning table",
    "collect":        "Print which products the models of a script compute, with their share of "
                      "the time",
    "tune-model":     "Tune the models that a script runs, and print what they gain",
    "adopt":          "Build, prove and time here what is recorded to win on this CPU model, and "
                      "serve it",
    "tune-shortlist": "Time the kernels chosen for this kind of CPU, and serve the best of them",
    "bench":          "Time the best stored kernels beside all baselines at once; exit 1 if a "
                      "verdict is refuted",
    "bench-models":   "Time whole models beside torch.compile, zentorch, OpenVINO and ONNX Runtime",
    "resolve":        "Print the verdict for a layer; exit 1 if no kernel is served",
    "explain":        "Print each step of the lookup for a layer, and the evidence for it",
    "source":         "Print the C++ of the winner or of any candidate, or write the winner's "
                      "library",
    "bundle":         "Write the kernels of layers, with a dispatcher in C, to a folder that needs "
                      "no Python",
    "verify":         "Prove one candidate and record the outcome, without timing it",
    "serve":          "Serve verdicts and kernels until stopped by Ctrl-C",
    "worker":         "Tune what a service is asked for, one job after the other, until stopped by "
                      "Ctrl-C",
    "dispatch":       "Place waiting jobs on the workers of a fleet until stopped by Ctrl-C",
    "jobs":           "Ask workers to tune layers, and print what came out",
    "lock":           "Write gemm-tuner.lock: which kernel each layer gets, for version control",
    "keys":           "Say which services, and whose measurements, to trust",
    "db":             "Copy, check, derive, prune and mirror a database",
    "revoke":         "Withdraw a kernel or a signing key from everyone; exit 1 if nothing changed",
    "tokens":         "Make, list and revoke tokens: who may ask a service for what",
    "contributions":  "Accept or drop what holders of tokens contributed",
    "audit":          "Print who changed what and when, the newest last",
    "report":         "Write what a database holds, or how two differ, as one HTML file to show "
                      "to others",
    "records":        "Export, import and attest records",
    "model":          "Check the model that ranks candidates, and record and train for it",
    "replay":         "Compare strategies of a search on recorded trials, without the machine",
    "simulate":       "Predict how long a call takes on many threads, and what bounds it",
}
# fmt: on

# How the help groups them, in its order.
PANELS = {
    "Start here": ("quickstart", "doctor", "cpu"),
    "Tune": ("sweep", "collect", "tune-model", "adopt", "tune-shortlist"),
    "Use what was tuned": ("resolve", "explain", "source", "lock", "bundle"),
    "Compare": ("bench", "bench-models", "report"),
    "Serve": ("serve", "worker", "jobs", "dispatch"),
    "Say who is trusted": ("keys", "tokens", "contributions", "revoke", "audit"),
    "Keep the database": ("db", "records"),
    "Work on the search": ("verify", "model", "replay", "simulate"),
}


class _CommandsOnDemand(TyperGroup):
    """A group whose commands are loaded when they are called: the help needs only their names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own types
        """Return the command that the arguments name, with the rest of them."""
        if args[0] in COMMANDS:
            self.add_command(_load(args[0]), args[0])
        return super().resolve_command(ctx, args)


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"gemm_tuner.cli.{name.replace('-', '_')}"


def _load(name: str) -> Any:  # noqa: ANN401 - typer names no public type for a command
    """Return a command with its options."""
    attribute = name.replace("-", "_")
    loaded = getattr(_loaded(module_of(name)), attribute)
    if isinstance(loaded, typer.Typer):
        command: Any = typer.main.get_group(loaded)
    else:
        single = typer.Typer(add_completion=False)
        single.command(help=COMMANDS[name])(loaded)
        command = typer.main.get_command(single)
    command.name = name
    return command


def _loaded(name: str) -> ModuleType:
    """Return a module of a command. What it loads stays, so nobody looks for garbage in it."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _unloaded() -> None:
    """Stand for a command until it is called."""


app = typer.Typer(
    name="gemm-tuner",
    cls=_CommandsOnDemand,
    help="Tune, prove, share and call CPU matrix-multiplication kernels",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _panel, _names in PANELS.items():
    for _name in _names:
        app.command(_name, help=COMMANDS[_name], rich_help_panel=_panel)(_unloaded)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(import_module("gemm_tuner.tuning.generator").generator_version())
        raise typer.Exit


@app.callback()
def configure(
    is_verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Log each step, and show where errors arise")
    ] = False,
    _is_version_wanted: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and the identity of the templates behind it",
        ),
    ] = False,
) -> None:
    """Tune, prove, share and call CPU matrix-multiplication kernels."""
    level = logging.DEBUG if is_verbose else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("gemm_tuner")
    package.handlers[:] = [handler]
    package.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
        make_printable(getattr(sys, name))
    code = run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _tell_of_output(error)
        # The interpreter would try once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    try:
        own = tuple(takewhile(lambda argument: argument != "--", arguments))  # not a script's
        _refuse_negative_numbers(own)
        _refuse_empty_options(own)
        code = app(args=list(arguments) or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        print_message(f"Error: {error.format_message()}")
        return error.exit_code
    except GemmTunerError as error:
        _LOG.debug("The command failed.", exc_info=True)
        print_message(f"Error: {error}")
        return _exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        print_message("Aborted; what was found before is kept.")
        return INTERRUPTED
    except OSError as error:
        _LOG.debug("The command failed.", exc_info=True)
        return _tell_of_output(error)
    except Exception as error:  # noqa: BLE001 - the last resort: a user sees one line
        _LOG.debug("The command failed.", exc_info=True)
        print_message(
            f"Error: unexpected {type(error).__name__}: {error}; run again with "
            f'"gemm-tuner -v …" and report it with the traceback at {_REPORT_AT}.'
        )
        return SOMETHING_IS_MISSING
    return code if isinstance(code, int) else 0


def _tell_of_output(error: OSError) -> int:
    """Say that a file, or the output, failed, unless its reader just left; return the exit code."""
    if isinstance(error, BrokenPipeError):
        return ANSWER_IS_NO
    what = error.filename or "the output"
    print_message(f"Error: {what} cannot be used: {error.strerror or error}; choose another place.")
    return SOMETHING_IS_MISSING


def _refuse_empty_options(arguments: Sequence[str]) -> None:
    """Refuse an option without a text, as of a variable of a script that was not set.

    An empty path would be the current folder, and an empty URL that of the default database.
    """
    for argument, after in pairwise((*arguments, "the end")):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and not (value if equals else after):
            raise InvalidSetting(f"{name} is empty; give it a value, or leave it out.")


def _refuse_negative_numbers(arguments: Sequence[str]) -> None:
    """Speak of a negative size as such; the parser would take it for an unknown option."""
    for before, argument in pairwise(arguments):
        is_value = before.startswith("--")
        if _NEGATIVE_NUMBER.fullmatch(argument) and not is_value:
            raise InvalidProblem(
                f"size {argument} is out of range; it must be from 0 to {MAX_DIMENSION}."
            )


def _exit_code(error: GemmTunerError) -> int:
    if isinstance(error, InvalidInput):
        return WRONG_USAGE
    if isinstance(error, MissingCapability | ServiceFailed | StoreFailed):
        return SOMETHING_IS_MISSING
    return ANSWER_IS_NO
