"""Convolutions as products: of an image's pixels, or of patches that are copied for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemm_tuner.torch.graphs import Node

# Patches that overlap are copied several times. For fewer columns of y, that takes longer than
# what a product may gain: 56x56 pixels of 64 channels, 3x3, are 7 MB beside 0.9 ms (Zen 5).
_FEWEST_COLUMNS = 128

_IMAGE_DIMENSIONS = 4


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


def window_of(node: Node) -> Window | None:
    """Return how a convolution of images moves, None of one that no product computes."""
    x, w, _bias, stride, padding, dilation, is_turned, _more, _groups = node.args
    arrays = [one.meta.get("val") for one in (x, w)]
    if is_turned or any(one is None or len(one.shape) != _IMAGE_DIMENSIONS for one in arrays):
        return None
    given = (arrays[1].shape[2:], stride, padding, dilation)
    if not all(isinstance(one, int) for each in given for one in each):
        return None
    return Window(*(_for_sides(one) for one in given))


def _for_sides(given: Sequence[int]) -> tuple[int, int]:
    height, *width = given
    return height, width[0] if width else height


def why_left(node: Node, window: Window) -> str:
    """Return why a convolution cannot be computed as a product, if so."""
    x, w, *_how, groups = node.args
    if groups != 1:
        return f"its channels are in {groups} groups; only one of 1 group is a product of rows."
    arrays = [one.meta["val"] for one in (x, node)]
    if any(isinstance(one, torch.SymInt) for array in arrays for one in array.shape[1:]):
        return "its height and width are known when it runs."
    is_last = all(one.is_contiguous(memory_format=torch.channels_last) for one in arrays)
    if not is_last and (window.is_pixel or window.overlaps):
        return (
            "x is not of channels last, so its rows would have to be copied; compile "
            "model.to(memory_format=torch.channels_last), for such an x."
        )
    n = w.meta["val"].shape[0]
    if window.overlaps and n < _FEWEST_COLUMNS:
        return f"for {n} channels of y, to copy the patches of x takes longer than is gained."
    return ""
