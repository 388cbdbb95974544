"""How far the outputs of a way are from those in f32, and how far they may be."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from gemm_tuner.models.row import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of an output from another: the `largest` one over the largest element, and of the norms.

    A few wrong elements show in the first, and many that are a little wrong in the second.
    """

    largest: float
    norm: float


def distances(outputs: Sequence[Any], expected: Sequence[Any]) -> list[Distance]:
    """Return how far each output, a tensor in f32, is from what is expected.

    Raises:
        ValueError: the shapes differ, or something is not finite.
    """
    return [_distance(y, wanted) for y, wanted in zip(outputs, expected, strict=True)]


def _distance(y: Any, expected: Any) -> Distance:  # noqa: ANN401 - tensors
    if y.shape != expected.shape:
        raise ValueError(f"an output has the shape {[*y.shape]}, not {[*expected.shape]}")
    off = y - expected
    found = Distance(
        largest=float(off.abs().max()) / (float(expected.abs().max()) or 1.0),
        norm=float(off.norm()) / (float(expected.norm()) or 1.0),
    )
    if not isfinite(found.largest):
        raise ValueError("an output is not finite")
    return found


def agreement(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return in which share of the rows the largest element is where it is expected.

    Rows are those of the last axis: of a classifier, this is how often both name one class first.
    """
    same = rows = 0
    for y, wanted in zip(outputs, expected, strict=True):
        found = y.argmax(-1) == wanted.argmax(-1)
        same, rows = same + int(found.sum()), rows + int(found.numel())
    return same / rows


def why_wrong(found: Sequence[Distance], own: Sequence[Distance], precision: Precision) -> str:
    """Return why outputs are not those of the model, empty where they are.

    `own` is how far PyTorch's eager mode is in this precision; each output has its own measure.
    """
    for place, (one, of_pytorch) in enumerate(zip(found, own, strict=True), start=1):
        which = f"output {place}" if len(found) > 1 else "its output"
        for off, of_own, of in (
            (one.norm, of_pytorch.norm, "the norm"),
            (one.largest, of_pytorch.largest, "the largest element"),
        ):
            tolerated = max(precision.tolerance, precision.times_own * of_own)
            if off > tolerated:
                return (
                    f"{which} is off by {off:.1e} of {of}; "
                    f"{tolerated:.0e} is tolerated in {precision.name}"
                )
    return ""
