"""`gemm-tuner collect`: which matrix products a script of PyTorch computes."""

import runpy
import sys
import traceback
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_line, print_message, print_table
from gemm_tuner.errors import InvalidSetting, MissingCapability

if TYPE_CHECKING:
    from gemm_tuner.torch.collecting import Collected

_SHOWN = 40


def collect(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python script that runs models of PyTorch")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the script is given")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the layers, as `sweep --shapes` reads them"
        ),
    ] = None,
    dtype: options.DTypeName = "f32",
) -> int:
    """Print which products the models of a script compute, with their share of the time."""
    if find_spec("torch") is None:
        raise MissingCapability('collect needs PyTorch: pip install "gemm-tuner[torch]".')
    from gemm_tuner.torch.collecting import Recording  # noqa: PLC0415 - loads PyTorch
    from gemm_tuner.torch.operators import TYPES  # noqa: PLC0415

    if dtype not in TYPES.values():
        raise InvalidSetting(
            f"dtype {dtype!r} is none that layers are collected of; use one of: "
            f"{', '.join(TYPES.values())}."
        )
    if not script.is_file():
        raise InvalidSetting(
            f"script {str(script)!r} is no file; give the path of a Python script."
        )
    recording = Recording()
    with recording:
        code = _run(script, arguments or [])
    collected = recording.collected
    if not collected:
        raise InvalidSetting(
            f"no product of matrices ran in {str(script)!r}; what other threads and processes "
            "compute is not seen, nor what is compiled."
        )
    _print(collected)
    if out is not None:
        count = collected.write_layers(out, dtype=dtype)
        told = (
            f"; tune them with: gemm-tuner sweep --shapes {out} --dtype {dtype} "
            "--regime cold_weights"
        )
        print_line(f"{count} layers of {dtype} are in {out}{told if count else ''}.")
    return code


def _run(script: Path, arguments: list[str]) -> int:
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
        print_message("The script was interrupted; what it computed until then follows.")
    except Exception as error:  # noqa: BLE001 - the user's own
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(script)
        ]
        place = f"{script}:{lines[-1]}" if lines else str(script)
        print_message(
            f"The script failed at {place} with {type(error).__name__}: {error}; "
            "what it computed until then follows."
        )
        return 1
    finally:
        sys.argv, sys.path[0] = given
    return 0


def _print(collected: "Collected") -> None:
    print_table(
        f"{len(collected)} kinds of products, the longest first",
        (">share", ">calls", "type", "m x n x k", "bias", "weights"),
        [
            (
                f"{one.share:.1%}",
                str(one.calls),
                one.dtype,
                one.sizes,
                "yes" if one.has_bias else "",
                _weights_text(one.weights),
            )
            for one in islice(collected, _SHOWN)
        ],
    )
    if len(collected) > _SHOWN:
        print_line(f"{len(collected) - _SHOWN} kinds that took less time are not shown.")


def _weights_text(weights: tuple[str, ...]) -> str:
    if not weights:
        return "none: computed by the model"
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return f"{weights[0]}{more}"
