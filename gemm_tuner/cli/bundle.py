"""`gemm-tuner bundle`: the kernels of a model's layers, with what C programs need to call them."""

import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import layers_of
from gemm_tuner.cli.arguments.places import check_no_database
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def bundle(
    shapes: Annotated[
        Path,
        typer.Argument(metavar="LAYERS.csv", help="The layers, in the form of --shapes of sweep"),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder, or an older bundle to replace")
    ],
    *,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the kernels of layers, with a dispatcher in C, to a folder that needs no Python."""
    from gemm_tuner.bundle.collect import collect  # noqa: PLC0415 - slow to load
    from gemm_tuner.bundle.place import check_place  # noqa: PLC0415 - beside the next
    from gemm_tuner.bundle.write import write_bundle  # noqa: PLC0415 - slow to load

    layout = options.with_groups(w_layout, groups)
    layers = layers_of(
        m=None,
        n=None,
        k=None,
        shapes=shapes,
        dtype=dtype,
        epilogue=epilogue,
        w_layout=layout,
        reduction=reduction,
        operation=operation,
    )
    context = options.execution_context(threads, regime)
    check_no_database(folder, [db])
    check_place(folder)
    repository = Repository(open_database(db, may_create=False, only_reads=True))
    cpu = detect_cpu()
    problems = [layer.problem for layer in layers]
    with aborting(signal.SIGTERM):
        with ProgressLine("bundle", later_s=0) as line:
            tell = partial(pace(line), "layers looked up")
            kernels, missing = collect(repository, problems, cpu=cpu, context=context, tell=tell)
        for one in missing:
            print_message(f"No kernel for {one.problem.text}: {one.reason}")
        if not kernels:
            print_message(f"Nothing was written to {folder}: no kernel is served for these layers.")
            raise typer.Exit(1)
        size_bytes = write_bundle(folder, kernels, missing, cpu=cpu, context=context)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "size_bytes": size_bytes,
                "kernels": {one.problem.text: one.artifact.sha256 for one in kernels},
                "missing": {one.problem.text: one.reason for one in missing},
            }
        )
    else:
        names = {kernel.layer_name for kernel in kernels}
        print_line(
            f"{folder}: {counted(len(kernels), 'kernel')} of {counted(len(names), 'layer')} "
            f"({bytes_text(size_bytes)}); README.md says how to "
            "build it"
        )
