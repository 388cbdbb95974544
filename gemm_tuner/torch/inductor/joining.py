"""Products of one x that are computed as one, with their weights one below the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch._ops import HigherOrderOperator

from gemm_tuner.domain.units import time_text
from gemm_tuner.domain.verdict import TUNED_ABOVE
from gemm_tuner.layers.wanted import CallTime, FoundLayer
from gemm_tuner.torch.inductor.epilogues import past_views, steps_after
from gemm_tuner.torch.inductor.graphs import ATEN, CASTS, SHOWS, VIEWS, Graph, Node, new_node
from gemm_tuner.torch.inductor.products import Product, is_constant
from gemm_tuner.torch.inductor.rewriting import weights


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTime:
    """The time of one kernel beside that of several, for the rows where it gains the least."""

    joined_ns: float
    parts_ns: float

    @property
    def is_faster(self) -> bool:
        """Return whether the one is shown to be faster, by what a verdict asks of a kernel."""
        return self.parts_ns > TUNED_ABOVE * self.joined_ns

    @property
    def text(self) -> str:
        """Return both times in words."""
        joined, parts = time_text(self.joined_ns), time_text(self.parts_ns)
        return (
            f"as one, they take at most {joined}, and {parts} at least one by one; they are joined "
            f"where that is {TUNED_ABOVE - 1:.0%} faster"
        )


def joined_time(parts: Sequence[Sequence[FoundLayer]], joined: FoundLayer) -> JoinedTime | None:
    """Return the time of products that are joined beside that of the parts; None if unknown.

    Args:
        parts: for each product, the ways to compute it, of which the fastest counts.
        joined: what there is for all of them as one.
    """
    compared = []
    for row, time in enumerate(joined.times):
        least = [_least_ns(ways, joined, row) for ways in parts]
        if time is None or None in least:
            return None
        parts_ns = sum(one for one in least if one is not None)
        compared.append(JoinedTime(joined_ns=time.greatest_ns, parts_ns=parts_ns))
    return min(compared, key=lambda one: one.parts_ns / one.joined_ns, default=None)


def _least_ns(ways: Iterable[FoundLayer], joined: FoundLayer, row: int) -> float | None:
    times: list[CallTime | None] = [
        way.times[row]
        for way in ways
        if way.regime is joined.regime and len(way.times) == len(joined.times)
    ]
    return min((time.least_ns for time in times if time is not None), default=None)


def is_timed(ways: Iterable[FoundLayer]) -> bool:
    """Return whether some time is known of one of several ways."""
    return any(any(way.times) for way in ways)


def groups_of(products: Iterable[Product], constants: frozenset[Node]) -> list[tuple[Product, ...]]:
    """Return the products of each x that can be joined: two or more with unlike weights.

    What follows such a product is computed in a pass over y in any case: no step of an epilogue
    follows, or a function that is then multiplied by something, as in a gated layer.
    """
    groups: dict[object, list[Product]] = {}
    for product in products:
        if _can_be_joined(product, constants):
            kind = _x_of(product.x), product.bias is None
            groups.setdefault(kind, []).append(product)
    return [tuple(group) for group in groups.values() if len(_by_weights(group)) > 1]


def join(graph: Graph, parts: Sequence[Product]) -> Product:
    """Compute products of one x as one, and give each what it was to be as a slice of that."""
    first, by_weights = parts[0], _by_weights(parts)
    with graph.inserting_before(first.node):
        w = _below_each_other(
            graph, [weights(graph, part, _hoisted(graph, part.w)) for part in unlike(parts)]
        )
        w_t = new_node(graph, ATEN.permute.default, (w, [1, 0]))
        if first.bias is None:
            y, bias = new_node(graph, ATEN.mm.default, (first.x, w_t)), None
        else:
            bias = _below_each_other(graph, [_hoisted(graph, part.bias) for part in unlike(parts)])
            y = new_node(graph, ATEN.addmm.default, (bias, first.x, w_t))
        begin = 0
        for of_weights in by_weights:
            end = begin + of_weights[0].sizes[0]
            piece = new_node(graph, ATEN.slice.Tensor, (y, 1, begin, end))
            begin = end
            for part in of_weights:
                part.node.replace_all_uses_with(piece)
    for part in parts:
        graph.erase_node(part.node)
    # Rows of a slice do not lie behind each other, so not every view of it is one.
    for node in graph.find_nodes(op="call_function", target=ATEN.view.default):
        node.target = ATEN.reshape.default
    return Product(y, name_of(parts), first.x, w, bias, is_transposed=False)


def name_of(parts: Iterable[Product]) -> str:
    """Return the name of several products."""
    return ", ".join(part.name for part in parts)


def sizes_of(parts: Sequence[Product]) -> tuple[int, int]:
    """Return n and k of products that are joined."""
    sizes = [part.sizes for part in unlike(parts)]
    return sum(n for n, _k in sizes), sizes[0][1]


def unlike(parts: Sequence[Product]) -> list[Product]:
    """Return one product of each weights and bias: where they are tied, one result serves all."""
    return [of_weights[0] for of_weights in _by_weights(parts)]


def _by_weights(parts: Sequence[Product]) -> list[list[Product]]:
    """Return the products of each weights and bias."""
    same: dict[object, list[Product]] = {}
    for part in parts:
        bias = part.bias and _origin(part.bias)
        same.setdefault((_origin(part.w), part.is_transposed, bias), []).append(part)
    return list(same.values())


def _origin(node: Node) -> object:
    """Return what is equal for nodes that cast or show the same constant in the same way."""
    if node.op == "get_attr":
        return node.target
    if node.target not in CASTS | SHOWS:
        return node
    return node.target, str(node.args[1:]), str(node.kwargs), _origin(node.args[0])


def _x_of(node: Node) -> object:
    """Return what is equal for nodes that hold the same x, however often it is viewed or cast."""
    shape, types = str(tuple(node.meta["val"].shape)), []
    while node.op == "call_function" and node.target in VIEWS | CASTS:
        if node.target in CASTS:
            types.append(node.meta["val"].dtype)
        node = node.args[0]
    return node, shape, tuple(types)


def _can_be_joined(product: Product, constants: frozenset[Node]) -> bool:
    if (
        product.is_image
        or bool(product.why_left)
        or product.quantised is not None
        or product.weight_only is not None
        or product.batch is not None
        or (product.bias is not None and not is_constant(product.bias, constants))
    ):
        return False
    steps = steps_after(product.node)
    if not steps:
        return not _leaves(product.node)
    [step, *others] = steps
    readers = past_views(step.result).users
    is_gate = len(readers) > 0 and all(one.target is ATEN.mul.Tensor for one in readers)
    return step.other is None and not others and is_gate


def _leaves(node: Node) -> bool:
    """Return whether y itself leaves the graph: as a slice it would have other strides.

    It leaves for the graphs of a branch or a loop too, which were made for its strides.
    """
    return any(
        user.op == "output"
        or isinstance(user.target, HigherOrderOperator)
        or (user.target in SHOWS and _leaves(user))
        for user in node.users
    )


def _hoisted(graph: Graph, node: Node) -> Node:
    """Return a constant as a node at the place where nodes are inserted now."""
    if node.op == "placeholder":
        return node
    return graph.node_copy(node, lambda one: _hoisted(graph, one))


def _below_each_other(graph: Graph, nodes: Sequence[Node]) -> Node:
    return new_node(graph, ATEN.cat.default, (list(nodes), 0))
