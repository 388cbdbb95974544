"""Batches whose products all have one w.

PyTorch computes a linear layer as such a batch where its x does not lie row after row, as after a
transposition, and no gradient of w is asked for (`requires_grad_(False)`, or w is a buffer).
Otherwise it computes one product of all rows, which kernels are for.
"""

from typing import Any

import torch

from gemm_tuner.torch.inductor.graphs import ATEN, VIEWS, Graph, Node, are_same, new_node
from gemm_tuner.torch.inductor.products import is_constant
from gemm_tuner.torch.inductor.quantised import floats_of_bytes
from gemm_tuner.torch.operators import TYPES

_MATRIX = 2


def as_one_product(graph: Graph, constants: frozenset[Node]) -> None:
    """Write batches with one constant w as a product of all rows.

    That is also what PyTorch makes of them where gradients are asked for, so that nothing is lost
    where no kernel is for it.
    """
    for node in graph.find_nodes(op="call_function", target=ATEN.bmm.default):
        w = _one_w(node.args[1])
        shape = _shape_of_rows(node)
        if w is None or shape is None or node.meta["val"].dtype not in TYPES:
            continue
        if not is_constant(w, constants) and floats_of_bytes(w, constants) is None:
            continue
        x = _given(node.args[0])
        with graph.inserting_before(node):
            rows = new_node(graph, ATEN.reshape.default, (x, [-1, w.meta["val"].shape[0]]))
            product = new_node(graph, ATEN.mm.default, (rows, w))
            product.meta = {**node.meta, **product.meta}  # such as the path of its module
            y = new_node(graph, ATEN.reshape.default, (product, shape))
        node.replace_all_uses_with(y)
        graph.erase_node(node)


def _one_w(node: Node) -> Node | None:
    """Return the matrix that a batch repeats, None where it is another batch."""
    lengths = node.meta["val"].shape[-_MATRIX:]
    while node.op == "call_function" and node.target in VIEWS | {ATEN.expand.default}:
        node = node.args[0]
        found = node.meta["val"].shape
        if not are_same(found[-_MATRIX:], lengths):
            return None
        if len(found) == _MATRIX:
            return node
    return None


def _given(x: Node) -> Node:
    """Return what x shows in a shape of its own or as it is."""
    while x.op == "call_function" and x.target in VIEWS | {ATEN.expand.default}:
        if x.target is ATEN.expand.default and not are_same(
            x.meta["val"].shape, x.args[0].meta["val"].shape
        ):
            return x
        x = x.args[0]
    return x


def _shape_of_rows(node: Node) -> list[Any] | None:
    """Return the shape of y for a view of its rows, None where that does not say it."""
    shape = [-1 if isinstance(one, torch.SymInt) else one for one in node.meta["val"].shape]
    is_empty = 0 in shape or 0 in node.args[0].meta["val"].shape[-1:]
    return None if is_empty or shape.count(-1) > 1 else shape
