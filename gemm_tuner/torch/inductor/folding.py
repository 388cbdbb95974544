"""Constants that scale and shift the channels of a convolution, as those of a batch normalisation.

Freezing folds them into convolutions that it finds. One that a kernel computes is none any more, so
they are folded before.
"""

from dataclasses import dataclass
from typing import Any

import torch

from gemm_tuner.torch.inductor.graphs import (
    ATEN,
    CASTS,
    PRIMS,
    Graph,
    Node,
    are_same,
    as_floats,
    new_node,
)
from gemm_tuner.torch.inductor.products import convolution_at
from gemm_tuner.torch.operators import TYPES

_STEPS = (ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor)
_IN_ANY_ORDER = (ATEN.add.Tensor, ATEN.mul.Tensor)

# What statistics and weights of a normalisation go through.
_COMPUTED = {
    *CASTS,
    *_STEPS,
    ATEN.sqrt.default,
    ATEN.rsqrt.default,
    ATEN.reciprocal.default,
    ATEN.exp.default,
    ATEN.unsqueeze.default,
    ATEN.reshape.default,
    ATEN.view.default,
}


@dataclass(frozen=True, slots=True)
class _Steps:
    """What follows a convolution: each operator with its constant, and the node of the result."""

    steps: tuple[tuple[Any, Node], ...]
    result: Node


def fold_channels(graph: Graph, constants: frozenset[Node]) -> frozenset[Node]:
    """Fold constants for each channel into the weights and the bias of convolutions.

    They are those of freezing: so nothing is lost where no kernel is for it. Return the nodes of
    constants, with those of the weights that were folded.
    """
    folded: set[Node] = set()
    known: dict[Node, bool] = dict.fromkeys(constants, True)
    for node in graph.find_nodes(op="call_function", target=ATEN.convolution.default):
        found = convolution_at(node)
        if found is None or found.why_left or node.meta["val"].dtype not in TYPES:
            continue
        arrays = [one for one in node.args[1:3] if one is not None]
        if not all(_is_computed(one, known) for one in arrays):
            continue
        after = _steps_after(node, known)
        if after is not None:
            folded.add(_fold(graph, node, after))
    if folded:
        graph.eliminate_dead_code()
    return constants | folded


def _is_computed(node: Any, known: dict[Node, bool]) -> bool:  # noqa: ANN401 - a node, or numbers
    """Return whether freezing computes a node: of constants alone, without chance or effect."""
    if not isinstance(node, torch.fx.Node):
        numbers = node if isinstance(node, list | tuple) else [node]
        return all(isinstance(one, int | float | torch.dtype) for one in numbers)
    if node not in known:
        is_pure = node.op == "call_function" and not node.kwargs and node.target in _COMPUTED
        known[node] = is_pure and all(_is_computed(one, known) for one in node.args)
    return known[node]


def _steps_after(node: Node, known: dict[Node, bool]) -> _Steps | None:
    """Return the constants that only reader after only reader takes, None without any."""
    value = node.meta["val"]
    steps: list[tuple[Any, Node]] = []
    last, at = None, node
    while len(at.users) == 1:
        [after] = at.users
        if not steps or after.target is not PRIMS.convert_element_type.default:
            other = _other(after, at)
            if not _is_of_channels(other, value.shape[1]) or not _is_computed(other, known):
                break
            steps.append((after.target, other))
        at = after
        found = at.meta.get("val")
        if found is None or not are_same(found.shape, value.shape):
            break
        is_alike = found.dtype == value.dtype and are_same(found.stride(), value.stride())
        if steps and is_alike:
            last = _Steps(tuple(steps), at)
        if found.dtype not in (value.dtype, torch.float32):
            break
    return last


def _other(step: Node, at: Node) -> Any:  # noqa: ANN401 - a node, or a number
    """Return what a sum, a difference or a product reads beside a node, None if it is none."""
    if step.target not in _STEPS or step.kwargs or list(step.args).count(at) != 1:
        return None
    place = list(step.args).index(at)
    return step.args[1 - place] if place == 0 or step.target in _IN_ANY_ORDER else None


def _is_of_channels(node: Any, channels: int) -> bool:  # noqa: ANN401 - a node, or a number
    """Return whether an array has one number for each channel of (count, channels, ...)."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if value is None or not value.dtype.is_floating_point:
        return False
    shape = tuple(value.shape)
    return shape in ((channels, 1, 1), (1, channels, 1, 1))


def _fold(graph: Graph, node: Node, after: _Steps) -> Node:
    """Write a convolution in the place of one and its steps, and return its weights."""
    x, w, bias, *how = node.args
    dtype, n = node.meta["val"].dtype, node.meta["val"].shape[1]
    with graph.inserting_before(after.result):
        scale, shift = None, None if bias is None else as_floats(graph, bias)
        for step, other in after.steps:
            target = step
            flat = as_floats(graph, new_node(graph, ATEN.reshape.default, (other, [n])))
            if target is ATEN.div.Tensor:
                target, flat = ATEN.mul.Tensor, new_node(graph, ATEN.reciprocal.default, (flat,))
            if target is ATEN.mul.Tensor:
                scale = flat if scale is None else new_node(graph, target, (scale, flat))
                shift = None if shift is None else new_node(graph, target, (shift, flat))
            elif shift is not None:
                shift = new_node(graph, target, (shift, flat))
            else:
                is_less = target is ATEN.sub.Tensor
                shift = new_node(graph, ATEN.neg.default, (flat,)) if is_less else flat
        if scale is not None:
            of_rows = new_node(graph, ATEN.reshape.default, (scale, [n, 1, 1, 1]))
            w = new_node(graph, ATEN.mul.Tensor, (as_floats(graph, w), of_rows))
            w = _as_type(graph, w, dtype)
        bias = None if shift is None else _as_type(graph, shift, dtype)
        folded = new_node(graph, ATEN.convolution.default, (x, w, bias, *how))
        folded.meta = {**node.meta, **folded.meta}  # such as the path of its module
    after.result.replace_all_uses_with(folded)
    return w


def _as_type(graph: Graph, node: Node, dtype: Any) -> Node:  # noqa: ANN401 - of PyTorch
    if node.meta["val"].dtype == dtype:
        return node
    return new_node(graph, PRIMS.convert_element_type.default, (node, dtype))
