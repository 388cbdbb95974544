"""What follows a product in a graph, as steps of the epilogue table.

A compiler has taken functions such as gelu apart. So they are recognised by what they compute: the
nodes between a product and the one that needs all of them are evaluated at some points, and
compared with the references of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.domain.step_kind import OperandShape
from gemm_tuner.domain.step_table import STEP_KINDS
from gemm_tuner.torch.inductor.graphs import ATEN, CASTS, VIEWS, Node, are_same, is_copy, is_view
from gemm_tuner.torch.inductor.quantised import Requantisation, requantised
from gemm_tuner.torch.operators import STEP_NUMBERS

_POINTWISE = frozenset(
    {
        ATEN.abs.default,
        ATEN.add.Scalar,
        ATEN.add.Tensor,
        ATEN.clamp.default,
        ATEN.clamp_max.default,
        ATEN.clamp_min.default,
        ATEN.div.Scalar,
        ATEN.div.Tensor,
        ATEN.elu.default,
        ATEN.erf.default,
        ATEN.exp.default,
        ATEN.expm1.default,
        ATEN.gelu.default,
        ATEN.gt.Scalar,
        ATEN.hardswish.default,
        ATEN.leaky_relu.default,
        ATEN.log1p.default,
        ATEN.maximum.default,
        ATEN.minimum.default,
        ATEN.mul.Scalar,
        ATEN.mul.Tensor,
        ATEN.neg.default,
        ATEN.pow.Tensor_Scalar,
        ATEN.reciprocal.default,
        ATEN.relu.default,
        ATEN.sigmoid.default,
        ATEN.silu.default,
        ATEN.sub.Scalar,
        ATEN.sub.Tensor,
        ATEN.tanh.default,
        ATEN.where.self,
    }
)
_MOST_NODES = 16
_PRODUCTS = frozenset({ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default})

# What reads a number for each column.
_VECTORS = {"channel_scale": ATEN.mul.Tensor, "bias": ATEN.add.Tensor}
_SCALES = frozenset({ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.div.Tensor, ATEN.div.Scalar})

# Where functions that are alike differ, and out to the ends of float32, where bounds would show.
# All is computed in float64, so that what differs is not rounded away.
_FAR = (1e-3, 12.5, 20.5, 40.0, 100.5, 1e3, 1e5, 1e10, 3e38)
_POINTS: NDArray[np.float64] = np.array(
    [*np.linspace(-9.0, 9.0, 73), *_FAR, *(-one for one in _FAR)]
)
_RELATIVE_ERROR, _ABSOLUTE_ERROR = 1e-9, 1e-14
# What is added against division by zero is smaller than any constant of a function in the table;
# what brings values near infinity is larger.
_LEAST_CONSTANT, _GREATEST_CONSTANT = 1e-3, 1e3
# These are taken apart into a sum that is zero where they are not.
_INEXACT = frozenset({"gelu_erf", "gelu_tanh"})
_BOUNDS = frozenset(
    {
        ATEN.clamp.default,
        ATEN.clamp_max.default,
        ATEN.clamp_min.default,
        ATEN.maximum.default,
        ATEN.minimum.default,
        ATEN.relu.default,
        ATEN.where.self,
    }
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that follows a product: its name, the node that holds its result, what it reads.

    `view` is the node that gave y the shape of the result; None where it is that of the product.
    One that makes bytes of y is several steps of the table. One that multiplies y by a number has
    this as its `scale`.
    """

    name: str
    result: Node
    view: Node | None
    other: Node | None = None
    scale: float | None = None
    requantisation: Requantisation | None = None


def steps_after(
    product: Node,
    *,
    is_quantised: bool = False,
    operands: frozenset[str] = frozenset({"add"}),
    may_broadcast: bool = False,
) -> list[Step]:
    """Return the steps after a product that nothing else in the graph reads the middle of.

    Of those that read something, `operands` names which may be among them, once each: `add` reads
    another array, `scale` a number, `channel_scale` and `bias` a number for each column. The array
    has the shape of y, or `may_broadcast` to it. What makes bytes of y is the last step, where the
    product `is_quantised`.
    """
    steps: list[Step] = []
    is_image = product.target is ATEN.convolution.default  # its columns are not the last dimension
    head = product if is_image else past_views(product)
    view = view_between(product, head)
    while True:
        step = _function_after(head)
        free = operands - {one.name for one in steps}
        if step is None and "scale" in free:
            step = _scale_after(head)
        if step is None and "add" in free:
            step = _addition_after(head, product, may_broadcast=may_broadcast)
        if step is None and not is_image:
            step = _vector_step_after(head, free & _VECTORS.keys())
        if step is None and is_quantised and (found := requantised(head)) is not None:
            name, node, how = found
            return [*steps, Step(name, node, view, requantisation=how)]
        if step is None:
            return steps
        steps.append(replace(step, view=view))
        head = step.result if is_image else past_views(step.result)
        view = view_between(step.result, head) or view


def past_views(node: Node) -> Node:
    """Return the last view of a node, or copy of one, that has its columns.

    Each view is all that reads the one before; those between may have other columns. Dropout that
    drops nothing leaves a copy.
    """
    last = view = node
    while len(view.users) == 1:
        [user] = view.users
        if is_copy(user):
            last = user if last is view else last
        elif not is_view(user):
            break
        elif user.target in VIEWS and _keeps_columns(node, user):
            last = user
        view = user
    return last


def view_between(node: Node, head: Node) -> Node | None:
    """Return the view after a node that has the shape of `head`, None where that is its own."""
    while head is not node and is_copy(head):
        head = head.args[0]
    return None if head is node else head


def _keeps_columns(node: Node, view: Node) -> bool:
    before, after = node.meta.get("val"), view.meta.get("val")
    if before is None or after is None or not before.dim() or not after.dim():
        return False
    columns = before.shape[-1], after.shape[-1]
    return all(isinstance(one, int) for one in columns) and columns[0] == columns[1]


def _scale_after(head: Node) -> Step | None:
    """Return the step that multiplies or divides by a number."""
    users = list(head.users)
    if len(users) != 1 or users[0].target not in _SCALES or users[0].kwargs:
        return None
    [scaled] = users
    numbers = [one for one in scaled.args if type(one) in (int, float)]
    value, result = head.meta.get("val"), scaled.meta.get("val")
    if len(numbers) != 1 or value is None or result is None or value.dtype != result.dtype:
        return None
    is_divided = scaled.target in (ATEN.div.Tensor, ATEN.div.Scalar)
    if is_divided and (scaled.args[0] is not head or not numbers[0]):
        return None
    factor = 1.0 / numbers[0] if is_divided else float(numbers[0])
    return Step("scale", scaled, None, scale=factor)


def _addition_after(head: Node, product: Node, *, may_broadcast: bool) -> Step | None:
    users = list(head.users)
    if len(users) != 1 or users[0].target is not ATEN.add.Tensor or users[0].kwargs:
        return None
    [added] = users
    others = [one for one in added.args if one is not head]
    if len(others) != 1 or not isinstance(others[0], torch.fx.Node):
        return None
    [other] = others
    values = [one.meta.get("val") for one in (head, other, added)]
    if any(type(one).__name__ != "FakeTensor" for one in values):
        return None
    is_alike = are_same(values[2].shape, values[0].shape) and all(
        one.dtype == product.meta["val"].dtype for one in values
    )
    is_alike &= are_same(values[1].shape, values[0].shape) or (
        may_broadcast and _is_broadcast(values[1].shape, values[0].shape)
    )
    if product.target is ATEN.convolution.default:
        is_alike &= all(one.is_contiguous(memory_format=torch.channels_last) for one in values)
    else:
        is_alike &= values[2].is_contiguous()
    is_alike &= other is not product and not _ends_later_product(other, product)
    return Step("add", added, None, other) if is_alike else None


def _ends_later_product(node: Node, product: Node) -> bool:
    """Return whether a node is what steps after a later product compute, for one reader.

    Of two products whose results are added, the later one adds: more steps may follow, and the
    other has its own.
    """
    seen, waiting = set(node.users), {node}
    while waiting and len(seen) <= _MOST_NODES and len(node.users) == 1:
        one = max(waiting)
        if one <= product or not seen.issuperset(one.users):
            return False
        if one.target in _PRODUCTS:
            return True
        if not (one.target in _POINTWISE or one.target in CASTS or is_view(one) or is_copy(one)):
            return False
        seen.add(one)
        waiting = waiting - {one} | {before for before in one.all_input_nodes if before > product}
    return False


def _vector_step_after(head: Node, names: frozenset[str]) -> Step | None:
    """Return the step that reads a number for each column, one of these names."""
    for name in sorted(names):
        if (found := vector_after(head, _VECTORS[name])) is not None:
            result, vector = found
            return Step(name, result, None, vector)
    return None


def vector_after(head: Node, target: object) -> tuple[Node, Node] | None:
    """Return what joins a node with a number for each column in its type, and these numbers."""
    users = list(head.users)
    if len(users) != 1 or users[0].target is not target or users[0].kwargs:
        return None
    [joined] = users
    others = [one for one in joined.args if one is not head]
    vector = others[0] if len(others) == 1 else None
    value = vector.meta.get("val") if isinstance(vector, torch.fx.Node) else None
    own = head.meta.get("val")
    is_vector = (
        isinstance(value, torch.Tensor)
        and isinstance(own, torch.Tensor)
        and own.dim() > 0
        and are_same(value.shape, own.shape[-1:])
        and value.dtype == own.dtype
    )
    return (joined, vector) if is_vector else None


def _is_broadcast(shape: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Return whether an array is the same along some dimensions of another, and has the others."""
    return len(shape) <= len(whole) and all(
        (isinstance(one, int) and one == 1) or are_same([one], [length])
        for one, length in zip(reversed(shape), reversed(whole), strict=False)
    )


def _function_after(head: Node) -> Step | None:
    """Return the longest function of the table that follows a node."""
    region, best = {head}, None
    dtype = head.meta["val"].dtype
    for _ in range(_MOST_NODES):
        reached = [
            user
            for node in region
            for user in node.users
            if user not in region and _is_of(user, region, dtype)
        ]
        if not reached:
            break
        region.add(min(reached))
        sinks = [one for one in region if one is not head and _is_sink(one, region)]
        if len(sinks) == 1 and (name := _name_of(head, sinks[0], region)):
            best = Step(name, sinks[0], None)
    return best


def _is_of(node: Node, region: set[Node], dtype: Any) -> bool:  # noqa: ANN401 - of PyTorch
    """Return whether a node is computed from the nodes of a region and numbers alone.

    No number is tiny: what a program adds so that it never divides by zero must stay. None is huge.
    """
    numbers = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, (int, float))]
    return (
        node.op == "call_function"
        and (node.target in _POINTWISE or _is_cast(node, dtype))
        and all(one in region for one in node.all_input_nodes)
        and all(isinstance(one, (int, float, torch.fx.Node)) for one in node.args[:1])
        and not any(
            one and not _LEAST_CONSTANT <= abs(one) <= _GREATEST_CONSTANT for one in numbers
        )
    )


def _is_cast(node: Node, dtype: Any) -> bool:  # noqa: ANN401 - of PyTorch
    """Return whether a node casts to float32, or to the type of the product, which y has."""
    value = node.meta.get("val")
    return node.target in CASTS and value is not None and value.dtype in (torch.float32, dtype)


def _is_sink(node: Node, region: set[Node]) -> bool:
    """Return whether only this node of the region is read from outside it."""
    return all(user in region for one in region - {node} for user in one.users)


def _name_of(head: Node, sink: Node, region: set[Node]) -> str | None:
    if sink.meta["val"].dtype != head.meta["val"].dtype:
        return None
    with _disable_current_modes():  # the compiler's, in which tensors have no elements
        values = {head: torch.from_numpy(_POINTS.copy())}
        try:
            for node in sorted(region - {head}):
                arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
                keywords = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
                values[node] = (
                    arguments[0] if node.target in CASTS else node.target(*arguments, **keywords)
                )
        except (RuntimeError, TypeError, KeyError):
            return None
        computed = values[sink].numpy()
    if computed.shape != _POINTS.shape:
        return None
    # A bound that keeps a function from zero must stay: a logarithm may follow.
    has_bounds = any(one.target in _BOUNDS for one in region)
    for name, expected in _known_functions().items():
        least = _ABSOLUTE_ERROR if name in _INEXACT and not has_bounds else 0.0
        if np.allclose(computed, expected, rtol=_RELATIVE_ERROR, atol=least):
            return name
    return None


@cache
def _known_functions() -> dict[str, NDArray[np.float64]]:
    """Return the functions of one value in the table, at the points."""
    with np.errstate(all="ignore"):
        return {
            kind.name: kind.reference(
                np, _POINTS, None, *(default for _name, default in kind.parameters)
            )
            for kind in STEP_KINDS.values()
            if kind.operand is OperandShape.NONE and kind.name in STEP_NUMBERS and not kind.hides
        }
