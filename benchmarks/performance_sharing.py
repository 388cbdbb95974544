"""What several m of a layer give up to read one packed copy of the weights."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench_rows import SharedLayer
from markdown_tables import ratio_text, table_head, table_row

_COLUMNS = (
    "Layer",
    "m",
    "Best alone",
    "Over oneDNN",
    "Chosen",
    "Over oneDNN",
    "Loss",
    "Packed format",
)
_MIB = 2**20


def sharing_lines(layers: Sequence[SharedLayer]) -> Iterator[str]:
    """Yield the section on shared weights, if any layer was swept for several m."""
    if not layers:
        return
    yield "## One packed copy for several m\n"
    alone, shared = (
        sum(layer[key] for layer in layers) for key in ("best_packed_bytes", "packed_bytes")
    )
    apart = [layer for layer in layers if len(layer["formats"]) > 1]
    yield (
        "What each m gives up so that all read one packed copy of the weights, at most "
        f"{layers[0]['max_loss']:.0%}: speeds of `gemm-tuner sweep --share-weights` over oneDNN, "
        "and the loss, which is 0 where the best kernel alone is chosen. A copy is one more where "
        "no kernel that reads another is within the loss. Together the weights take "
        f"{shared / _MIB:.0f} MiB, and {alone / _MIB:.0f} MiB where each m has its best; more than "
        f"one copy: {', '.join(layer['layer'] for layer in apart) or 'none'} "
        f"({len(apart)} of {len(layers)} layers).\n"
    )
    yield from table_head(_COLUMNS)
    for layer in layers:
        for kernel in layer["kernels"]:
            best, chosen = kernel["best"], kernel["chosen"]
            yield table_row(
                layer["layer"],
                kernel["m"],
                *_cells(best),
                *_cells(chosen),
                f"{chosen['loss']:.1%}",
                f"`{chosen['packed_format']}`",
            )
    yield ""


def _cells(option: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kernel and its speed, or the baseline and 1 where that is faster."""
    if option["candidate"] is None:
        return "oneDNN", ratio_text(1.0)
    ratio = option["ratio"]
    return f"`{option['candidate']}`", ratio_text(ratio["median"] if ratio else None)
