"""`gemm-tuner collect`: which matrix products a script of PyTorch computes."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.arguments.script import (
    Arguments,
    Script,
    check_script,
    load_pytorch,
    run_script,
)
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.user_file import cannot_be_written

if TYPE_CHECKING:
    from gemm_tuner.torch.model.collecting import Collected

_SHOWN = 40


def collect(
    script: Script,
    arguments: Arguments = None,
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
    check_place(out, others=[script])
    check_script(script, "collect")
    with aborting():
        load_pytorch()
    from gemm_tuner.torch.model.collecting import Recording  # noqa: PLC0415 - loads PyTorch
    from gemm_tuner.torch.operators import TYPES  # noqa: PLC0415

    if dtype not in TYPES.values():
        raise InvalidSetting(
            f"dtype {dtype!r} is none that layers are collected of; use one of: "
            f"{', '.join(TYPES.values())}."
        )
    recording = Recording()
    with recording:
        code = run_script(script, arguments or [])
    collected = recording.collected
    if not collected:
        raise InvalidSetting(
            f"no product of matrices ran in {str(script)!r}; what other threads and processes "
            "compute is not seen, nor what is compiled."
        )
    _print(collected)
    if out is not None:
        try:
            count = collected.write_layers(out, dtype=dtype)
        except OSError as error:
            raise cannot_be_written(out, error.strerror or str(error)) from error
        told = f"; tune them with: gemm-tuner sweep --shapes {out} --dtype {dtype} --regime both"
        print_line(f"{out} holds {counted(count, 'product')} of {dtype}{told if count else ''}.")
    return code


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
                one.weights_text,
            )
            for one in islice(collected, _SHOWN)
        ],
    )
    print_line(
        f"Everything else takes {collected.rest:.1%} of the time, such as operators without such "
        "products."
    )
    if len(collected) > _SHOWN:
        print_line(f"{len(collected) - _SHOWN} kinds that took less time are not shown.")
