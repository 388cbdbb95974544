"""Convolutions as products: of an image's pixels, or of patches that are copied for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Patches that overlap are copied several times. For fewer columns of y, that takes longer than
# what a product may gain: 56x56 pixels of 64 channels, 3x3, are 7 MB beside 0.9 ms (Zen 5).
_FEWEST_COLUMNS = 128

IMAGE_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Window:
    """How a convolution moves over an image: what is given, for height and width each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def is_pixel(self) -> bool:
        """Return whether patches are the pixels of the image, so that nothing is copied."""
        return (self.kernel, self.stride, self.padding) == ((1, 1), (1, 1), (0, 0))

    @property
    def overlaps(self) -> bool:
        """Return whether a pixel may be in several patches."""
        return any(one > step for one, step in zip(self.kernel, self.stride, strict=True))

    @property
    def arguments(self) -> tuple[list[int], ...]:
        """Return what `gemm_tuner::patches` takes after x."""
        return tuple(map(list, (self.kernel, self.stride, self.padding, self.dilation)))


@dataclass(frozen=True, slots=True)
class Convolution:
    """The arguments of `aten.convolution` that are no arrays, and the arrays by their shapes.

    x is (count, channels, height, width), w (n, channels of a group, height, width), and y
    (count, n, height, width).
    """

    x: Any
    w: Any
    y: Any
    window: Window
    groups: int

    @property
    def sizes(self) -> tuple[Any, int, int]:
        """Return the rows, n and k of the product."""
        count, n, *lengths = self.y.shape
        return count * math.prod(lengths), n, math.prod(self.w.shape[1:])

    @property
    def why_left(self) -> str:
        """Return why it cannot be computed as a product, if so."""
        if self.groups != 1:
            return (
                f"its channels are in {self.groups} groups; only one of 1 group is a product of "
                "rows."
            )
        if any(
            isinstance(one, torch.SymInt) for each in (self.x, self.y) for one in each.shape[1:]
        ):
            return "its height and width are known when it runs."
        is_last = all(
            one.is_contiguous(memory_format=torch.channels_last) for one in (self.x, self.y)
        )
        if not is_last and (self.window.is_pixel or self.window.overlaps):
            return (
                "x is not of channels last, so its rows would have to be copied; compile "
                "model.to(memory_format=torch.channels_last), for such an x."
            )
        n = self.w.shape[0]
        if self.window.overlaps and n < _FEWEST_COLUMNS:
            return f"for {n} channels of y, to copy the patches of x takes longer than is gained."
        return ""


def convolution_of(arguments: Sequence[Any], arrays: Sequence[Any]) -> Convolution | None:
    """Return a convolution of images, None of one that no product computes.

    Args:
        arguments: those of `aten.convolution`.
        arrays: x, w and y, which may be without elements; None is not known.
    """
    _x, _w, _bias, stride, padding, dilation, is_turned, _more, groups = arguments
    if is_turned or any(one is None or len(one.shape) != IMAGE_DIMENSIONS for one in arrays):
        return None
    x, w, y = arrays
    given = (w.shape[2:], stride, padding, dilation)
    if not all(isinstance(one, int) for each in given for one in each):
        return None
    return Convolution(x, w, y, Window(*(_for_sides(one) for one in given)), groups)


def _for_sides(given: Sequence[int]) -> tuple[int, int]:
    height, *width = given
    return height, width[0] if width else height
