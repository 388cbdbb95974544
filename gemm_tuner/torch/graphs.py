"""What the nodes of a graph of ATen's operators do, and new nodes."""

from operator import getitem
from typing import Any

import torch

Node = Any  # torch.fx.Node
Graph = Any  # torch.fx.Graph

ATEN, PRIMS = torch.ops.aten, torch.ops.prims

VIEWS = frozenset(
    {ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default}  # noqa: SLF001 - so called
)
CASTS = frozenset({PRIMS.convert_element_type.default, ATEN._to_copy.default})  # noqa: SLF001
TRANSPOSES = frozenset({ATEN.permute.default, ATEN.t.default, ATEN.transpose.int})
# What shows the elements of an array, or some of them, in another shape.
SHOWS = (
    VIEWS
    | TRANSPOSES
    | {
        ATEN.alias.default,
        ATEN.detach.default,
        ATEN.expand.default,
        ATEN.select.int,
        ATEN.slice.Tensor,
        ATEN.split.Tensor,
        ATEN.split_with_sizes.default,
        ATEN.squeeze.default,
        ATEN.squeeze.dim,
        ATEN.squeeze.dims,
        ATEN.unbind.int,
        ATEN.unsqueeze.default,
        getitem,
    }
)


def new_node(graph: Graph, target: Any, arguments: tuple[Any, ...]) -> Node:  # noqa: ANN401
    """Return a node that calls an operator, and knows the type and shape of its result."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda one: one.meta["val"]))
    return node


def untransposed(node: Node) -> Node | None:
    """Return the matrix that a node is the transpose of, or None."""
    if node.op != "call_function" or node.target not in TRANSPOSES:
        return None
    order = list(node.args[1:])
    if node.target is ATEN.permute.default and list(node.args[1]) != [1, 0]:
        return None
    if node.target is ATEN.transpose.int and {one % 2 for one in order} != {0, 1}:
        return None
    return node.args[0]
