"""Products of patches timed beside PyTorch's convolution, when a model is compiled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.domain.units import bytes_text, time_text
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.torch.inductor.convolutions import Window
from gemm_tuner.torch.inductor.graphs import ATEN, Node
from gemm_tuner.torch.operators import OperatorLayer

# A product of patches is taken from here on, by the medians and by the fastest of the rounds.
_FASTER = 1.03
# Below this after as many rounds, no more of them change what comes out.
_LOST, _FEWEST_ROUNDS = 0.8, 2
_ROUNDS, _LONGEST_S = 9, 0.3
# Of patches that are larger, the copy is memory's work, and a model may lack it.
_MOST_BYTES = 128 << 20
_LEAST_CACHE_BYTES = 32 << 20  # where the CPU does not say


@dataclass(frozen=True, slots=True)
class Beside:
    """Whether a product of patches is faster than the convolution, and why, in words."""

    is_faster: bool
    reason: str


_KNOWN: dict[tuple[object, ...], Beside] = {}


def is_faster_than_convolution(
    node: Node, window: Window, layer: OperatorLayer, *, adds: bool
) -> Beside:
    """Time a product of patches beside PyTorch's convolution, once for each shape.

    Both have weights that no cache holds, and an x that one may. It takes a tenth of a second, and
    three tenths for large images. `adds`: the kernel reads another array of the shape of y. What
    cannot be timed is no faster.
    """
    x, w, bias, *_rest = node.args
    x_shape, w_shape = (tuple(map(_hint, given.meta["val"].shape)) for given in (x, w))
    y_shape = tuple(map(_hint, node.meta["val"].shape))
    given = _Convolution(
        x_shape=x_shape,
        w_shape=w_shape,
        rows=y_shape[0] * math.prod(y_shape[2:]),
        window=window,
        dtype=x.meta["val"].dtype,
        is_last=x.meta["val"].is_contiguous(memory_format=torch.channels_last),
        has_bias=bias is not None,
        adds=adds,
    )
    kernels = tuple(one.kernel.artifact.sha256 for one in layer.kernels)
    known = given, kernels, torch.get_num_threads()
    if known not in _KNOWN:
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
            _KNOWN[known] = _compare(given, layer)
    return _KNOWN[known]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    rows: int
    window: Window
    dtype: Any
    is_last: bool
    has_bias: bool
    adds: bool

    @property
    def patches_bytes(self) -> int:
        """Return the size of all patches."""
        return self.rows * math.prod(self.w_shape[1:]) * int(self.dtype.itemsize)

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return x, w and the bias."""
        order = torch.channels_last if self.is_last else torch.contiguous_format
        x = torch.ones(*self.x_shape, dtype=self.dtype).to(memory_format=order)
        w = torch.ones(*self.w_shape, dtype=self.dtype) / math.prod(self.w_shape[1:])
        return x, w, torch.ones(self.w_shape[0], dtype=self.dtype) if self.has_bias else None


def _compare(given: _Convolution, layer: OperatorLayer) -> Beside:
    if layer.kernel_for(given.rows) is None:
        return Beside(
            is_faster=False,
            reason=f"no kernel is for the {given.rows} rows of patches that it was compiled for.",
        )
    if given.patches_bytes > _MOST_BYTES:
        size = bytes_text(given.patches_bytes)
        return Beside(is_faster=False, reason=f"its patches would take {size}.")
    try:
        rounds = _rounds(given, layer)
    except RuntimeError as error:  # such as for want of memory
        [line, *_more] = str(error).splitlines() or [type(error).__name__]
        return Beside(is_faster=False, reason=f"its patches cannot be timed: {line}")
    whole, ours, copied = (median(times) for times in zip(*rounds, strict=True))
    fastest = min(one for one, _ours, _copied in rounds) / min(one for _, one, _copied in rounds)
    return Beside(
        is_faster=min(_speedup(rounds), fastest) >= _FASTER,
        reason=(
            f"PyTorch's convolution took {time_text(whole * 1e9)}, and a product of patches "
            f"{time_text(ours * 1e9)}, {time_text(copied * 1e9)} of it to copy them."
        ),
    )


_Round = tuple[float, float, float]  # seconds of the convolution, of ours, and of the copy in this


def _speedup(rounds: list[_Round]) -> float:
    return median(whole / ours for whole, ours, _copied in rounds)


def _rounds(given: _Convolution, layer: OperatorLayer) -> list[_Round]:
    x, w, bias = given.arrays()
    convolve = _convolution(given, x, w, bias)
    by_patches = _product(given, layer, x, w, bias)
    cache_bytes = max(detect_cpu().caches.l3_bytes, _LEAST_CACHE_BYTES)
    cache = torch.zeros(2 * cache_bytes, dtype=torch.uint8)

    def timed(call: Callable[[], float]) -> tuple[float, float]:
        cache.add_(1)
        x.mul_(1)
        begin_s = perf_counter()
        copied_s = call()
        return perf_counter() - begin_s, copied_s - begin_s

    rounds: list[_Round] = []
    began_s = perf_counter()
    for number in range(_ROUNDS + 1):
        if number % 2:
            (whole_s, _), (ours_s, copied_s) = timed(convolve), timed(by_patches)
        else:
            (ours_s, copied_s), (whole_s, _) = timed(by_patches), timed(convolve)
        if number:  # the first warms up
            rounds.append((whole_s, ours_s, copied_s))
        is_late = perf_counter() - began_s > _LONGEST_S
        if len(rounds) >= _FEWEST_ROUNDS and (is_late or _speedup(rounds) < _LOST):
            break
    return rounds


def _convolution(given: _Convolution, x: Any, w: Any, bias: Any) -> Callable[[], float]:  # noqa: ANN401
    """Return PyTorch's convolution as Inductor calls it: by oneDNN where it can."""
    _kernel, stride, padding, dilation = given.window.arguments
    is_by_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if given.dtype == torch.bfloat16:
        is_by_onednn &= torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - as Inductor asks
    if not is_by_onednn:

        def plain() -> float:
            ATEN.convolution(x, w, bias, stride, padding, dilation, False, [0, 0], 1)
            return 0.0

        return plain
    prepared = torch._C._nn.mkldnn_reorder_conv2d_weight(  # noqa: SLF001 - as Inductor does
        w.to_mkldnn(), padding, stride, dilation, 1, list(given.x_shape)
    )
    arguments: tuple[Any, ...] = x, prepared, bias, padding, stride, dilation, 1, "none", [], ""

    def by_onednn() -> float:
        torch.ops.mkldnn._convolution_pointwise(*arguments)  # noqa: SLF001 - as Inductor does
        return 0.0

    return by_onednn


def _product(
    given: _Convolution,
    layer: OperatorLayer,
    x: Any,  # noqa: ANN401 - tensors
    w: Any,  # noqa: ANN401
    bias: Any,  # noqa: ANN401
) -> Callable[[], float]:
    """Return what copies patches and multiplies them, and says when they were copied."""
    n, k = layer.problem.n, layer.problem.k
    elements = w.permute(0, 2, 3, 1).reshape(n, k).contiguous()
    packed = torch.ops.gemm_tuner.pack(elements, layer.packed_bytes, layer.number)
    copy = torch.ops.gemm_tuner.patches.default
    multiply = torch.ops.gemm_tuner.linear.default
    other = torch.ones(given.rows, n, dtype=given.dtype) if given.adds else None

    def call() -> float:
        patches = copy(x, *given.window.arguments)
        copied_s = perf_counter()
        y = multiply(patches, packed, bias, layer.number, other, None)
        if not given.is_last:
            y.reshape(given.x_shape[0], -1, n).transpose(1, 2).contiguous()
        return copied_s

    return call


def _hint(length: Any) -> int:  # noqa: ANN401 - a number, or one that is known when it runs
    if isinstance(length, torch.SymInt):
        return int(length.node.hint) if length.node.has_hint() else 1
    return int(length)
