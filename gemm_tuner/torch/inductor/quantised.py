"""Products of bytes in a graph: floats that were rounded to bytes, and became floats again.

A quantised model of PyTorch (PT2E) computes with floats: `dequantize(quantize(x))` and
`dequantize(w)` go into an ordinary product, and the compiler is to see what that means. Kernels
multiply the bytes themselves; their epilogue takes the zero point off, and scales the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.torch.inductor.graphs import (
    ATEN,
    CASTS,
    SHOWS,
    VIEWS,
    Graph,
    Node,
    as_floats,
    new_node,
)

BYTES: dict[Any, str] = {torch.uint8: "u8", torch.int8: "s8"}
_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
# What X86InductorQuantizer leaves of a byte with `reduce_range`.
_SEVEN_BITS = (0, 127)
# The greatest k whose sums stay in 32 bits, whatever the bytes are: the limits that a model names
# do not bound its weights.
MOST_SUMMED = (2**31 - 1) // (255 * 128)

# A number, or a node whose value is known when the graph runs.
Number = float | Node


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes that floats were made of: `scale * (bytes - zero_point)`, then shown as `views`."""

    node: Node
    scale: Number
    zero_point: Number
    views: tuple[Node, ...] = ()

    def placed(self, graph: Graph) -> Node:
        """Return the bytes in the shape of the floats, at the place where nodes are inserted."""
        node = self.node
        for view in self.views:
            node = new_node(graph, ATEN.reshape.default, (node, view.args[1]))
        return node


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a product of bytes reads: x, and w (n, k) with a scale for each row."""

    x: Bytes
    w: Node
    w_scale: Node

    @property
    def types(self) -> str:
        """Return the types of x, w and the sums."""
        return f"{BYTES[self.x.node.meta['val'].dtype]}_s8_s32"

    def channel_scale(self, graph: Graph) -> Node:
        """Return the scale of each column of sums, where nodes are inserted now."""
        scale, w_scale = self.x.scale, as_floats(graph, self.w_scale)
        if isinstance(scale, torch.fx.Node):
            scale = new_node(graph, ATEN.reshape.default, (as_floats(graph, scale), [1]))
        return new_node(graph, ATEN.mul.Tensor, (w_scale, scale))


@dataclass(frozen=True, slots=True)
class Requantisation:
    """What makes bytes of y: the scale and the zero point, and the type of the bytes."""

    scale: float
    zero_point: int
    type: str


def quantised_of(x: Node, w: Node, graph_constants: frozenset[Node]) -> Quantised | None:
    """Return what a product of two nodes multiplies, if that is bytes by constant signed bytes."""
    x_bytes, weights = _x_of(x), _w_of(w)
    if x_bytes is None or weights is None:
        return None
    w_bytes, scale, zero_point = weights
    if not {w_bytes, scale, zero_point} <= graph_constants or not _is_zero(zero_point):
        return None
    return Quantised(x_bytes, w_bytes, scale)


def floats_of_bytes(w: Node, graph_constants: frozenset[Node]) -> Node | None:
    """Return the node that makes floats of constant bytes which `w` shows, None of another."""
    shown, ops = w, _operators()
    while shown.op == "call_function" and shown.target in SHOWS | CASTS:
        shown = shown.args[0]
    if ops is None:
        return None
    makers = (ops.dequantize_per_tensor.default, ops.dequantize_per_channel.default)
    return shown if shown.target in makers and shown.args[0] in graph_constants else None


def why_not_as_bytes(x: Node, w: Node, graph_constants: frozenset[Node]) -> str | None:
    """Return why a product is not of bytes although its constant weights are, None of others."""
    shown = floats_of_bytes(w, graph_constants)
    if shown is None:
        return None
    if shown.target is torch.ops.quantized_decomposed.dequantize_per_tensor.default:
        return "its weights have one scale for all of them, not one for each channel."
    return _why_not_weights(shown, is_turned=shown is not w) or (
        "its x is not of bytes with one scale and a zero point among them, or was cast since."
        if _x_of(x) is None
        else "the scales of its weights are no constants."
    )


def _why_not_weights(floats: Node, *, is_turned: bool) -> str:
    """Return why weights are not taken that were made of bytes by channel, if so."""
    axis, dtype = floats.args[3], floats.args[6]
    if dtype is not torch.int8 or axis != 0:
        return "its weights are not signed bytes with a scale for each row of w (n, k)."
    if is_turned or floats.meta["val"].dtype != torch.float32:
        return "its weights are cast, cut or turned between their bytes and the product."
    return "" if _is_zero(floats.args[2]) else "its weights have zero points."


def requantised(head: Node) -> tuple[str, Node, Requantisation] | None:
    """Return the steps that make bytes of y, the node of these, and what they are; or None."""
    users = list(head.users)
    ops = _operators()
    if len(users) != 1 or ops is None or users[0].target is not ops.quantize_per_tensor.default:
        return None
    [node] = users
    _y, scale, zero_point, *limits, dtype = node.args
    if dtype not in _LIMITS or head.meta["val"].dtype != torch.float32 or node.kwargs:
        return None
    steps = "scale+y_zero_point"
    if dtype is torch.uint8 and tuple(limits) == _SEVEN_BITS:
        steps += "+clamp:0:127"
    elif tuple(limits) != _LIMITS[dtype]:
        return None
    return steps, node, Requantisation(scale, zero_point, BYTES[dtype])


def dequantised_from(function: Any, args: Sequence[Any]) -> Any | None:  # noqa: ANN401
    """Return the bytes of which an operator makes floats, None of another operator."""
    ops = _operators()
    if ops is None or function not in (
        ops.dequantize_per_tensor.default,
        ops.dequantize_per_tensor.tensor,
        ops.dequantize_per_channel.default,
    ):
        return None
    return args[0] if args[0].dtype in BYTES else None


def _operators() -> Any | None:  # noqa: ANN401 - of PyTorch
    """Return the operators of quantised models, None if nothing has loaded them."""
    ops = torch.ops.quantized_decomposed
    return ops if hasattr(ops, "quantize_per_tensor") else None


def _x_of(node: Node) -> Bytes | None:
    views: list[Node] = []
    while node.op == "call_function" and node.target in VIEWS:
        views.insert(0, node)
        node = node.args[0]
    ops = _operators()
    if ops is None or node.target not in (
        ops.dequantize_per_tensor.default,
        ops.dequantize_per_tensor.tensor,
    ):
        return None
    given, scale, zero_point = node.args[:3]
    dtype = given.meta["val"].dtype
    if dtype not in BYTES or node.meta["val"].dtype != torch.float32:
        return None
    if not _is_read(scale) or not _is_read(zero_point, _LIMITS[dtype]):
        return None
    return Bytes(given, scale, zero_point, tuple(views))


def _is_read(number: Number, limits: tuple[float, float] = (-inf, inf)) -> bool:
    """Return whether the operators read a number of x: in limits, or an array of one element."""
    if isinstance(number, torch.fx.Node):
        return isinstance(number.meta.get("val"), torch.Tensor)
    return limits[0] <= number <= limits[1]


def _w_of(node: Node) -> tuple[Node, Node, Node] | None:
    """Return the signed bytes (n, k) of weights, their scales and zero points."""
    ops = _operators()
    if ops is None or node.target is not ops.dequantize_per_channel.default:
        return None
    given, scale, zero_point, axis, _low, _high, dtype = node.args[:7]
    is_taken = dtype is torch.int8 and axis == 0 and node.meta["val"].dtype == torch.float32
    nodes = (given, scale, zero_point)
    if not is_taken or not all(isinstance(one, torch.fx.Node) for one in nodes):
        return None
    return given, scale, zero_point


def _is_zero(node: Node) -> bool:
    """Return whether a constant of the graph is zero: its value is known while it is compiled."""
    value = _value_of(node)
    if value is None:
        return False
    with _disable_current_modes():
        return not bool(value.any())


def _value_of(node: Node) -> Any | None:  # noqa: ANN401 - a tensor
    graph = node.graph
    if node.op == "get_attr":
        return attrgetter(node.target)(graph.owning_module)
    context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
    if context is None or not context.params_flat_unwrap_subclasses:
        return None
    values = dict(
        zip(graph.find_nodes(op="placeholder"), context.params_flat_unwrap_subclasses, strict=False)
    )
    return values.get(node)
