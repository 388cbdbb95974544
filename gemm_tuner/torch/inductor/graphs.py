"""What the nodes of a graph of ATen's operators do, and new nodes."""

from collections.abc import Mapping, Sequence
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.shape_prop import _extract_tensor_metadata

Node = Any  # torch.fx.Node
Graph = Any  # torch.fx.Graph

ATEN, PRIMS = torch.ops.aten, torch.ops.prims

VIEWS = frozenset(
    {ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default}  # noqa: SLF001 - so called
)
# What torch.compile makes of `scaled_dot_product_attention` for a CPU.
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - so called
# What `TransformerEncoderLayer` and `MultiheadAttention` call without gradients.
FAST_PATHS = frozenset(
    {
        ATEN._transformer_encoder_layer_fwd.default,  # noqa: SLF001 - so called
        ATEN._native_multi_head_attention.default,  # noqa: SLF001
    }
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


def is_recorded(graph: Graph) -> bool:
    """Return whether a graph computes derivatives too: PyTorch names what comes back so."""
    return any(
        str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")
    )


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether lengths are known to be the same.

    To compare those that are known when the graph runs would fix them to what the example has.
    """
    return len(one) == len(other) and all(
        statically_known_true(first == second) for first, second in zip(one, other, strict=True)
    )


def new_node(
    graph: Graph,
    target: Any,  # noqa: ANN401 - an operator
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> Node:
    """Return a node that calls an operator, and knows the type and shape of its result.

    Inductor's own pass for quantised models reads these in `tensor_meta`.
    """
    node = graph.call_function(target, arguments, dict(keywords))
    value = target(*torch.fx.node.map_arg(arguments, lambda one: one.meta["val"]), **keywords)
    node.meta["val"] = value
    node.meta["tensor_meta"] = _extract_tensor_metadata(value)
    return node


def as_floats(graph: Graph, node: Node) -> Node:
    """Return a node as float32, where nodes are inserted now."""
    if node.meta["val"].dtype == torch.float32:
        return node
    return new_node(graph, PRIMS.convert_element_type.default, (node, torch.float32))


def untransposed(node: Node) -> Node | None:
    """Return the matrix that a node is the transpose of, or the batch of these, or None."""
    if node.op != "call_function" or node.target not in TRANSPOSES:
        return None
    dimensions = len(node.meta["val"].shape)
    if dimensions < 2:
        return None
    *others, rows, columns = range(dimensions)
    if node.target is ATEN.permute.default:
        is_transpose = [one % dimensions for one in node.args[1]] == [*others, columns, rows]
    else:
        turned = node.args[1:] or (0, 1)
        is_transpose = {one % dimensions for one in turned} == {rows, columns}
    return node.args[0] if is_transpose else None


def is_copy(node: Node) -> bool:
    """Return whether a node copies all elements of an array to where they are in order, too."""
    kept = (None, torch.preserve_format, torch.contiguous_format)
    return node.target is ATEN.clone.default and node.kwargs.get("memory_format") in kept


def is_view(node: Node) -> bool:
    """Return whether a node shows all elements of an array in their order, in another shape."""
    if node.target in VIEWS:
        return True
    value = node.args[0].meta.get("val") if node.target is ATEN.permute.default else None
    if value is None:
        return False
    lengths = [value.shape[one] for one in node.args[1]]
    moved = [
        one % len(lengths)
        for one, length in zip(node.args[1], lengths, strict=True)
        if not (isinstance(length, int) and length == 1)
    ]
    return moved == sorted(moved)
