"""The entry of the command line: its commands, its exit codes and how it fails."""

import logging
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from gemm_tuner.cli.bench import bench
from gemm_tuner.cli.cpu import cpu
from gemm_tuner.cli.explain import explain
from gemm_tuner.cli.model import model
from gemm_tuner.cli.output import print_message
from gemm_tuner.cli.quickstart import quickstart
from gemm_tuner.cli.records import records
from gemm_tuner.cli.resolve import resolve
from gemm_tuner.cli.serve import serve
from gemm_tuner.cli.source import source
from gemm_tuner.cli.sweep import sweep
from gemm_tuner.cli.tune_shortlist import tune_shortlist
from gemm_tuner.cli.verify import verify
from gemm_tuner.domain.problem import MAX_DIMENSION
from gemm_tuner.errors import (
    GemmTunerError,
    InvalidInput,
    InvalidProblem,
    MissingCapability,
    ServiceFailed,
    StoreFailed,
)
from gemm_tuner.tuning.generator import generator_version

_LOG = logging.getLogger(__name__)
_NEGATIVE_NUMBER = re.compile(r"-\d.*")
_REPORT_AT = "the issue tracker of gemm-tuner"

ANSWER_IS_NO = 1
WRONG_USAGE = 2
SOMETHING_IS_MISSING = 3
INTERRUPTED = 130

app = typer.Typer(
    name="gemm-tuner",
    help="Tune, prove, share and call CPU matrix-multiplication kernels",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (
    quickstart,
    cpu,
    sweep,
    tune_shortlist,
    bench,
    resolve,
    explain,
    source,
    verify,
    serve,
):
    app.command(help=(command.__doc__ or "").partition("\n")[0].rstrip("."))(command)
app.add_typer(records, name="records")
app.add_typer(model, name="model")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(generator_version())
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
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one line on stderr."""
    try:
        _refuse_negative_numbers(arguments)
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
    except BrokenPipeError:
        return ANSWER_IS_NO
    except Exception as error:  # noqa: BLE001 - the last resort: a user sees one line
        _LOG.debug("The command failed.", exc_info=True)
        print_message(
            f"Error: unexpected {type(error).__name__}: {error}; run again with "
            f'"gemm-tuner -v …" and report it with the traceback at {_REPORT_AT}.'
        )
        return SOMETHING_IS_MISSING
    return code if isinstance(code, int) else 0


def _refuse_negative_numbers(arguments: Sequence[str]) -> None:
    """Speak of a negative size as such; the parser would take it for an unknown option."""
    for before, argument in pairwise(arguments):
        is_value = before.startswith("--") and before != "--"
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
