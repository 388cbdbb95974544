"""Products of two activations in a graph of Inductor, and the operator in their place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gemm_tuner.domain.operation import Operation
from gemm_tuner.torch.inductor.epilogues import Step, steps_after
from gemm_tuner.torch.inductor.graphs import (
    ATEN,
    ATTENTION,
    VIEWS,
    Graph,
    Node,
    new_node,
    untransposed,
)
from gemm_tuner.torch.inductor.graphs import are_same as are_same  # noqa: PLC0414 - attention takes it here
from gemm_tuner.torch.inductor.products import are_of_one_type, module_of
from gemm_tuner.torch.operators import TYPES

_PRODUCTS = frozenset({ATEN.mm.default, ATEN.bmm.default})
_WITH_SUMMAND = frozenset({ATEN.addmm.default, ATEN.baddbmm.default})
_COPIES = frozenset({ATEN.clone.default, ATEN.alias.default, ATEN.detach.default})

# What comes after a product besides functions; each reads an operand, which a chain has once.
_OPERANDS = frozenset({"scale", "add"})


@dataclass(frozen=True, slots=True)
class Factor:
    """Matrices (..., rows, columns) where a node has them, or (..., columns, rows) if turned."""

    node: Node
    is_turned: bool

    @property
    def before(self) -> tuple[Any, ...]:
        """Return the lengths of the dimensions before those of a matrix."""
        return tuple(self.node.meta["val"].shape[:-2])

    @property
    def has_rows(self) -> bool:
        """Return whether a row is dense, and the next lies behind it."""
        return _is_dense(self.node.meta["val"], -2 if self.is_turned else -1)

    @property
    def has_columns(self) -> bool:
        """Return whether a column is dense, and the next lies behind it."""
        return _is_dense(self.node.meta["val"], -1 if self.is_turned else -2)

    @property
    def layout(self) -> str:
        """Return how kernels read it as w: `nk` or `kn`."""
        return "nk" if self.has_columns and (self.is_turned or not self.has_rows) else "kn"


@dataclass(frozen=True, slots=True)
class Activations:
    """A product of two activations: y (..., m, n) = x (..., m, k) @ w (..., k, n).

    `node` computes it, of one product or a batch, with the steps `own` after it. `w_layout` says
    how w lies. It is left as it is where it says why.
    """

    node: Node
    name: str
    x: Factor
    w: Factor
    w_layout: str
    own: tuple[Step, ...] = ()
    why_left: str = ""
    operation: str = Operation.MATMUL.value

    @property
    def batch(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of products, None where it is one alone."""
        lengths = self.node.meta["val"].shape[:-2]
        return lengths[0] if lengths else None

    @property
    def rows(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of rows of x and y."""
        return self.node.meta["val"].shape[-2]

    @property
    def types(self) -> str:
        """Return the type of x, w and y."""
        return TYPES[self.node.meta["val"].dtype]

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Return n and k."""
        return self.node.meta["val"].shape[-1], _factors(self.node)[0].meta["val"].shape[-1]

    @property
    def before(self) -> tuple[Any, ...]:
        """Return the dimensions of products: those of the factor that has more of them."""
        return max(self.x.before, self.w.before, key=len)

    def steps(self) -> list[Step]:
        """Return the steps after it that a kernel could compute too."""
        free = _OPERANDS - {one.name for one in self.own}
        found = steps_after(self.node, operands=free, may_broadcast=True)
        for count, step in enumerate(found):
            if step.other is not None and not self._can_add(step):
                return found[:count]
        return found

    def _can_add(self, step: Step) -> bool:
        """Return whether what a step adds lies along the dimensions of the products."""
        other: Node = step.other
        lengths = step.result.meta["val"].shape
        is_whole = are_same(other.meta["val"].shape, lengths)
        return is_whole or _split(lengths[:-2], self.before) is not None


def activations_of(graph: Graph, constants: frozenset[Node]) -> frozenset[Node]:
    """Return the nodes of products of which neither factor follows from constants alone.

    Of attention, one of q, k and v does not.
    """
    varying: set[Node] = set()
    for node in graph.nodes:
        is_source = node.op in ("placeholder", "get_attr") and node not in constants
        if is_source or any(one in varying for one in node.all_input_nodes):
            varying.add(node)
    return frozenset(
        node
        for node in varying
        if node.target is ATTENTION
        or (
            node.target in _PRODUCTS | _WITH_SUMMAND
            and all(one in varying for one in _factors(node))
        )
    )


def product_of_activations(node: Node) -> Activations | None:
    """Return the product that a node computes, None if kernels read no such arrays."""
    given = _factors(node)
    values = [one.meta.get("val") for one in (*given, node)]
    if not are_of_one_type(values):
        return None
    if any(isinstance(one, int) and one == 0 for value in values for one in value.shape):
        return None
    x = deepest(given[0], lambda one: one.has_rows)
    w = deepest(given[1], lambda one: one.has_rows or one.has_columns)
    own = _own_steps(node)
    return Activations(
        node=node,
        name=module_of(node),
        x=x,
        w=w,
        w_layout=w.layout,
        own=own or (),
        why_left=_why_left(node, x, w, own),
    )


def _factors(node: Node) -> tuple[Node, Node]:
    x, w = node.args[1:3] if node.target in _WITH_SUMMAND else node.args[:2]
    return x, w


def _why_left(node: Node, x: Factor, w: Factor, own: tuple[Step, ...] | None) -> str:
    """Return why a product cannot be computed by a kernel, if so."""
    n, k = node.meta["val"].shape[-1], _factors(node)[0].meta["val"].shape[-1]
    for name, length in (("n", n), ("k", k)):
        if not isinstance(length, int):
            return f"its {name} is known when it runs, and a kernel is for one {name}."
    if own is None:
        return "it is multiplied by 0, or what is added to it is scaled or not of its type."
    if not x.has_rows:
        return "x does not lie in dense rows, so it would have to be copied."
    if not (w.has_rows or w.has_columns):
        return "w lies in no dense rows or columns, so it would have to be copied."
    return ""


def _own_steps(node: Node) -> tuple[Step, ...] | None:
    """Return the steps that a node itself computes after its product, None if kernels have none."""
    if node.target in _PRODUCTS:
        return ()
    summand, alpha, beta = node.args[0], node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    value = summand.meta.get("val")
    if alpha == 0:  # nothing of a factor is read then, also what is no number
        return None
    steps = () if alpha == 1 else (Step("scale", node, None, scale=float(alpha)),)
    if beta == 0:
        return steps
    if beta != 1 or value is None or value.dtype != node.meta["val"].dtype:
        return None
    name = "bias" if are_same(value.shape, node.meta["val"].shape[-1:]) else "add"
    return (*steps, Step(name, node, None, other=summand))


def deepest(given: Node, is_read: Any) -> Factor:  # noqa: ANN401 - of a factor
    """Return what a factor shows or is a copy of, as deep as a kernel reads it where it lies."""
    found = factor = Factor(given, is_turned=False)
    while (below := _below(factor)) is not None:
        factor = below
        if is_read(factor):
            found = factor
    return found


def _below(factor: Factor) -> Factor | None:
    """Return the same matrices as an argument of a node has them, None if it has others."""
    node = factor.node
    if node.op != "call_function":
        return None
    if (matrices := untransposed(node)) is not None:
        return Factor(matrices, not factor.is_turned)
    if node.target not in _COPIES | VIEWS | {ATEN.expand.default}:
        return None
    shape, below = (one.meta["val"].shape for one in (node, node.args[0]))
    is_shown = (
        node.target in _COPIES
        or (node.target in VIEWS and are_same(shape[-2:], below[-2:]))
        or (node.target is ATEN.expand.default and are_same(shape, below))
    )
    return Factor(node.args[0], factor.is_turned) if is_shown else None


def _is_dense(value: Any, dimension: int) -> bool:  # noqa: ANN401 - a tensor
    """Return whether the elements along one of the last two dimensions lie side by side.

    Where it is known only when it runs whether lines of them overlap, the operator looks.
    """
    other = -3 - dimension
    length, others = value.shape[dimension], value.shape[other]
    is_dense = statically_known_true(length == 1) or statically_known_true(
        value.stride(dimension) == 1
    )
    is_apart = statically_known_true(others == 1) or not statically_known_true(
        value.stride(other) < length
    )
    return is_dense and is_apart


def insert_matmul(graph: Graph, product: Activations, number: int, steps: Sequence[Step]) -> None:
    """Put the operator in the place of a product and the steps after it."""
    last = steps[-1].result if steps else product.node
    chain = [*product.own, *steps]
    scale = next((one.scale for one in chain if one.scale is not None), 1.0)
    operands = {one.name: one for one in chain if one.other is not None}
    bias = operands.get("bias")
    with graph.inserting_before(last):
        lengths = _lengths(graph, max(product.x, product.w, key=lambda one: len(one.before)))
        x = _placed(graph, product, product.x, lengths, is_turned=product.x.is_turned)
        is_nk = product.w_layout == "nk"
        w = _placed(graph, product, product.w, lengths, is_turned=product.w.is_turned != is_nk)
        other = _other(graph, product, operands.get("add"), lengths)
        arguments = (x, w, number, bias.other if bias else None, other, scale)
        y = new_node(graph, torch.ops.gemm_tuner.matmul.default, arguments)
        if not are_same(y.meta["val"].shape, last.meta["val"].shape):
            y = new_node(graph, ATEN.reshape.default, (y, _shape_of(graph, product, steps)))
    last.replace_all_uses_with(y)
    graph.erase_node(last)


def _placed(
    graph: Graph, product: Activations, factor: Factor, lengths: list[Any], *, is_turned: bool
) -> Node:
    """Return a factor with the dimensions of the products, turned if asked for."""
    node = factor.node
    if not are_same(factor.before, product.before):
        matrix = [_length(graph, node, place) for place in (-2, -1)]
        node = new_node(graph, ATEN.reshape.default, (node, [*lengths, *matrix]))
    if not is_turned:
        return node
    *others, rows, columns = range(len(node.meta["val"].shape))
    return new_node(graph, ATEN.permute.default, (node, [*others, columns, rows]))


def _other(
    graph: Graph, product: Activations, step: Step | None, lengths: list[Any]
) -> Node | None:
    """Return what a step adds, with the dimensions of the products or such as are broadcast."""
    if step is None or are_same(step.result.meta["val"].shape[:-2], product.before):
        return step and step.other
    other: Node = step.other
    own = other.meta["val"].shape[:-2]
    if not own:
        return other
    groups = _split(step.result.meta["val"].shape[:-2], product.before)
    if groups is None:  # it is of the same shape as the result
        shape = [*lengths, *_shape_of(graph, product, ())[-2:]]
    else:
        is_one = [statically_known_true(one == 1) for one in own]
        places = zip(is_one, groups[len(groups) - len(own) :], strict=True)
        matrix = [_length(graph, other, place) for place in (-2, -1)]
        shape = [*(1 if one else lengths[at] for one, group in places for at in group), *matrix]
    return new_node(graph, ATEN.reshape.default, (other, shape))


def _split(whole: Sequence[Any], pieces: Sequence[Any]) -> list[list[int]] | None:
    """Return which of some dimensions each of others was split into, None where one was not."""
    groups: list[list[int]] = []
    place = 0
    for length in whole:
        group: list[int] = []
        product: Any = 1
        while place < len(pieces) and not (group and statically_known_true(product == length)):
            group.append(place)
            product *= pieces[place]
            place += 1
        if not statically_known_true(product == length):
            return None
        groups.append(group)
    return groups if place == len(pieces) else None


def _shape_of(graph: Graph, product: Activations, steps: Sequence[Step]) -> Sequence[Any]:
    """Return the shape of a result, of numbers and of nodes where these are known when it runs."""
    if steps and steps[-1].view is not None:
        shape: Sequence[Any] = steps[-1].view.args[1]
        return shape
    x = _factors(product.node)[0]
    places = range(len(x.meta["val"].shape) - 1)
    return [*(_length(graph, x, place) for place in places), product.sizes[0]]


def _lengths(graph: Graph, factor: Factor) -> list[Any]:
    return [_length(graph, factor.node, place) for place in range(len(factor.before))]


def _length(graph: Graph, node: Node, place: int) -> Any:  # noqa: ANN401 - a number, or a node
    """Return the length of a dimension, as a node where it is known when the graph runs."""
    length = node.meta["val"].shape[place]
    if isinstance(length, int):
        return length
    size = graph.call_function(ATEN.sym_size.int, (node, place % len(node.meta["val"].shape)))
    size.meta["val"] = length
    return size
