"""Convolutions as products: of an image's pixels, or of patches that are copied for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.domain.units import time_text
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.torch.graphs import Node
from gemm_tuner.torch.operators import OperatorLayer

# Patches that overlap are copied several times. For fewer columns of y, that takes longer than
# what a product may gain: 56x56 pixels of 64 channels, 3x3, are 7 MB beside 0.9 ms (Zen 5).
_FEWEST_COLUMNS = 128

_ROUNDS = 9
# A kernel for patches is taken from here on, by the median of the rounds.
_FASTER = 1.03

_IMAGE_DIMENSIONS = 4
_LEAST_CACHE_BYTES = 32 << 20  # where the CPU does not say


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


@dataclass(frozen=True, slots=True)
class _Times:
    """Medians, in seconds, and how many times as fast a product of patches is."""

    convolution_s: float
    patches_s: float
    speedup: float


_KNOWN: dict[tuple[object, ...], _Times] = {}


def is_faster_than_convolution(
    node: Node, window: Window, layer: OperatorLayer, *, adds: bool
) -> tuple[bool, str]:
    """Time a product of patches beside PyTorch's convolution, and return whether it wins, and why.

    Both have weights that no cache holds, and an x that one may. It takes a tenth of a second, once
    for each shape. `adds`: the kernel reads another array of the shape of y.
    """
    x, w, bias, *_rest = node.args
    x_shape, w_shape = (tuple(map(_hint, given.meta["val"].shape)) for given in (x, w))
    is_last = x.meta["val"].is_contiguous(memory_format=torch.channels_last)
    dtype, threads = x.meta["val"].dtype, torch.get_num_threads()
    kernels = tuple(one.kernel.artifact.sha256 for one in layer.kernels)
    known = (x_shape, w_shape, window, is_last, dtype, kernels, threads, bias is None, adds)
    if known not in _KNOWN:
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
            given = _Convolution(x_shape, w_shape, window, dtype, is_last, bias is not None)
            _KNOWN[known] = _timed(given, layer, adds=adds)
    times = _KNOWN[known]
    ours_s = times.convolution_s / times.speedup
    return times.speedup >= _FASTER, (
        f"PyTorch's convolution took {time_text(times.convolution_s * 1e9)}, and a product of "
        f"patches {time_text(ours_s * 1e9)}, {time_text(times.patches_s * 1e9)} of it to copy them."
    )


@dataclass(frozen=True, slots=True)
class _Convolution:
    x_shape: Sequence[int]
    w_shape: Sequence[int]
    window: Window
    dtype: Any
    is_last: bool
    has_bias: bool

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return x, w and the bias."""
        order = torch.channels_last if self.is_last else torch.contiguous_format
        x = torch.ones(*self.x_shape, dtype=self.dtype).to(memory_format=order)
        w = torch.ones(*self.w_shape, dtype=self.dtype) / math.prod(self.w_shape[1:])
        return x, w, torch.ones(self.w_shape[0], dtype=self.dtype) if self.has_bias else None


def _timed(given: _Convolution, layer: OperatorLayer, *, adds: bool) -> _Times:
    x, w, bias = given.arrays()
    kernel, stride, padding, dilation = given.window.arguments
    n, k = layer.problem.n, layer.problem.k
    prepared = torch._C._nn.mkldnn_reorder_conv2d_weight(  # noqa: SLF001 - as Inductor does
        w.to_mkldnn(), padding, stride, dilation, 1, list(given.x_shape)
    )
    rows = w.permute(0, 2, 3, 1).reshape(n, k).contiguous()
    packed = torch.ops.gemm_tuner.pack(rows, layer.packed_bytes, layer.number)
    copy = torch.ops.gemm_tuner.patches.default
    multiply = torch.ops.gemm_tuner.linear.default
    other = torch.ones(len(copy(x, kernel, stride, padding, dilation)), n, dtype=x.dtype)

    def convolve() -> float:
        begin_s = perf_counter()
        torch.ops.mkldnn._convolution_pointwise(  # noqa: SLF001 - as Inductor does
            x, prepared, bias, padding, stride, dilation, 1, "none", [], ""
        )
        return perf_counter() - begin_s

    def by_patches() -> tuple[float, float]:
        begin_s = perf_counter()
        patches = copy(x, kernel, stride, padding, dilation)
        copied_s = perf_counter()
        y = multiply(patches, packed, bias, layer.number, other if adds else None, None)
        if not given.is_last:
            count, _k, *_sides = given.x_shape
            y.reshape(count, -1, n).transpose(1, 2).contiguous()
        return perf_counter() - begin_s, copied_s - begin_s

    cache_bytes = max(detect_cpu().caches.l3_bytes, _LEAST_CACHE_BYTES)
    cache = torch.zeros(2 * cache_bytes, dtype=torch.uint8)
    rounds = []
    for number in range(_ROUNDS + 1):
        whole_s, times = 0.0, (0.0, 0.0)
        for is_convolution in (True, False) if number % 2 else (False, True):
            cache.add_(1)
            x.mul_(1)
            if is_convolution:
                whole_s = convolve()
            else:
                times = by_patches()
        rounds.append((whole_s, *times))
    kept = rounds[1:]
    return _Times(
        convolution_s=median(one for one, _ours, _copied in kept),
        patches_s=median(copied for _one, _ours, copied in kept),
        speedup=median(one / ours for one, ours, _copied in kept),
    )


def _hint(length: Any) -> int:  # noqa: ANN401 - a number, or one that is known when it runs
    if isinstance(length, torch.SymInt):
        return int(length.node.hint) if length.node.has_hint() else 1
    return int(length)
