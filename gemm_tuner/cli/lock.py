"""`gemm-tuner lock`: write the lock file of a project, or check that all of it can be had."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer, layers_of
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.terminal.output import print_line
from gemm_tuner.client.client import Client
from gemm_tuner.client.lock import LOCK_FILE
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import ServiceUnreachable
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel


def lock(
    m: options.OptionalRows = None,
    n: options.OptionalColumns = None,
    k: options.OptionalDepth = None,
    *,
    shapes: options.Shapes = None,
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="The lock file")] = LOCK_FILE,
    url: Annotated[
        str | None, typer.Option("--url", help="Ask this service, by default yours on this machine")
    ] = None,
    frozen: Annotated[
        bool,
        typer.Option(
            "--frozen",
            envvar="GEMM_TUNER_FROZEN",
            help="Write nothing; exit 1 unless the file names a kernel or library for each layer",
        ),
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", envvar="GEMM_TUNER_OFFLINE", help="Ask no service; use what is cached"
        ),
    ] = False,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    operation: options.OperationName = "linear",
    threads: options.Threads = 1,
    regime: options.RegimeName = "hot",
) -> None:
    """Write gemm-tuner.lock: which kernel each layer gets, for version control."""
    layout = options.with_groups(w_layout, groups)
    layers = layers_of(
        m=m,
        n=n,
        k=k,
        shapes=shapes,
        dtype=dtype,
        epilogue=epilogue,
        w_layout=layout,
        reduction=reduction,
        operation=operation,
    )
    context = options.execution_context(threads, regime)
    if not frozen:
        check_place(file, others=[shapes])
    client = Client(url, lock=file if frozen else None, frozen=frozen, offline=offline)
    problems = [layer.problem for layer in layers]
    found = client.kernels(problems, threads=context.threads, regime=context.regime)
    if not frozen:
        _check_whole(client, layers, found)
        client.write_lock(file)
    kernels = sum(isinstance(one, Kernel) for one in found)
    libraries = len(found) - kernels
    print_line(
        f"{file}: {counted(kernels, 'layer')} with a kernel, {libraries} for which a library "
        "computes"
    )


def _check_whole(
    client: Client, layers: Sequence[Layer], found: Sequence[Kernel | FallbackKernel]
) -> None:
    """Check that the service answered for each layer, so that no old lock file is lost."""
    answered = {place[0] for place in client.given}
    for layer, kernel in zip(layers, found, strict=True):
        if layer.problem.text not in answered:
            raise ServiceUnreachable(f"nothing was written: {layer.problem.text}: {kernel.reason}")
