"""Products with weights of bytes alone in a graph: floats by bytes, and the sums scaled.

torchao's weight-only models compute `x @ cast(w).T * scale + bias`; kernels read the bytes, and
multiply them in floats.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gemm_tuner.torch.inductor.epilogues import past_views, vector_after, view_between
from gemm_tuner.torch.inductor.graphs import (
    ATEN,
    CASTS,
    Graph,
    Node,
    as_floats,
    new_node,
    untransposed,
)

# Each row of w is a group, with one scale.
WEIGHT_ONLY_LAYOUT = "nk:gk"


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """Weights (n, k) of signed bytes, and the scale of each row; `view` gave y its last shape."""

    w: Node
    scale: Node
    view: Node | None

    w_type = "s8"
    w_layout = WEIGHT_ONLY_LAYOUT

    @property
    def sizes(self) -> tuple[int, int]:
        """Return n and k."""
        n, k = self.w.meta["val"].shape
        return n, k

    def read(self, graph: Graph) -> tuple[Node, Node]:
        """Return the bytes (n, k) and the scales (n, 1), where nodes are inserted now."""
        column = new_node(graph, ATEN.reshape.default, (self.scale, [-1, 1]))
        return self.w, as_floats(graph, column)

    def plain(self, graph: Graph, w: Node) -> Node:
        """Return the weights that the bytes stand for, of the same as floats (n, k)."""
        column = new_node(graph, ATEN.reshape.default, (self.scale, [-1, 1]))
        return new_node(graph, ATEN.mul.Tensor, (w, column))


@dataclass(frozen=True, slots=True)
class Scaled:
    """What follows a product: the node of the scaled sums, with their bias if there is one."""

    node: Node
    bias: Node | None
    weight_only: WeightOnly


def scaled_after(node: Node, w: Node, is_constant: Callable[[Node], bool]) -> Scaled | None:
    """Return what makes a product by `w` one of bytes and scales, None where it is none.

    `w` is what is multiplied: (k, n).
    """
    given = _bytes_of(w)
    if given is None:
        return None
    scaled, scale, view = _vector_after(node, ATEN.mul.Tensor)
    if scaled is None or not is_constant(scale):
        return None
    added, bias, later = _vector_after(scaled, ATEN.add.Tensor)
    weight_only = WeightOnly(given, scale, later if added is not None and later else view)
    return Scaled(added if added is not None else scaled, bias, weight_only)


def _bytes_of(w: Node) -> Node | None:
    """Return the bytes (n, k) whose transpose, as floats, a node is."""
    casts = 0
    turned = 0
    while w.op == "call_function":
        if w.target in CASTS:
            casts, w = casts + 1, w.args[0]
        elif (source := untransposed(w)) is not None:
            turned, w = turned + 1, source
        else:
            return None
    value = w.meta.get("val")
    is_bytes = isinstance(value, torch.Tensor) and value.dtype == torch.int8 and value.dim() == 2
    return w if is_bytes and casts == 1 and turned == 1 else None


def _vector_after(node: Node, target: object) -> tuple[Node | None, Node | None, Node | None]:
    """Return what joins a node with a vector of its columns, the vector, and the view between."""
    head = past_views(node)
    found = vector_after(head, target)
    return (None, None, None) if found is None else (*found, view_between(node, head))
