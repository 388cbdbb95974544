"""Attention as PyTorch computes it in a graph of Inductor, and the operator in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gemm_tuner.domain.operation import Operation
from gemm_tuner.torch.inductor.activations import Factor, are_same, deepest
from gemm_tuner.torch.inductor.epilogues import Step
from gemm_tuner.torch.inductor.graphs import ATEN, Graph, Node, new_node
from gemm_tuner.torch.inductor.products import are_of_one_type, module_of
from gemm_tuner.torch.operators import TYPES


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention: y (b, h, m, d) = softmax(scale q k^T + mask) v; k and v may have fewer heads.

    `node` computes it. k and v are the nodes to read, before they were copied: where heads were
    repeated, they are (b, heads, repeats, n, d). It is left as it is where it says why.
    """

    node: Node
    name: str
    q: Node
    k: Node
    v: Node
    own: tuple[Step, ...]
    why_left: str = ""
    operation: str = Operation.ATTENTION.value
    w_layout: str = "nk"

    @property
    def batch(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of heads of the whole batch, those that are joined being one."""
        count, heads, *_matrix = (self.k if self.joined > 1 else self.q).meta["val"].shape
        return count * heads

    @property
    def rows(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of queries that are multiplied by the same keys."""
        return self.joined if self.joined > 1 else self.q.meta["val"].shape[-2]

    @property
    def joined(self) -> int:
        """Return how many heads of one query each share keys, so that they are rows of one."""
        _count, heads, queries, _size = self.q.meta["val"].shape
        shared = self.k.meta["val"].shape[1]
        is_causal = any(step.name == "causal" for step in self.own)
        are_known = all(isinstance(one, int) for one in (heads, queries, shared))
        return heads // shared if are_known and queries == 1 and not is_causal else 1

    @property
    def types(self) -> str:
        """Return the type of all arrays."""
        return TYPES[self.q.meta["val"].dtype]

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Return the number of keys, and the head size."""
        return tuple(self.k.meta["val"].shape[-2:])

    def steps(self) -> list[Step]:
        """Return no steps: none follows the values."""
        return []


def attention_of(node: Node) -> Attention | None:
    """Return the attention that a node computes, None if kernels read no such arrays."""
    q, k, v = node.args[:3]
    values = [one.meta.get("val") for one in (q, k, v)]
    if not are_of_one_type(values):
        return None
    if any(isinstance(one, int) and one == 0 for value in values for one in value.shape):
        return None
    read = [deepest(one, _reader_of(one, may_repeat=True)) for one in (k, v)]
    if not _are_alike(*(one.node.meta["val"].shape for one in read)):
        read = [deepest(one, _reader_of(one, may_repeat=False)) for one in (k, v)]
    own = _steps_of(node)
    return Attention(
        node=node,
        name=module_of(node),
        q=q,
        k=read[0].node,
        v=read[1].node,
        own=tuple(own),
        why_left=_why_left(node, [Factor(q, is_turned=False), *read], own),
    )


def _are_alike(k: Sequence[Any], v: Sequence[Any]) -> bool:
    """Return whether keys and values are as many, or may be: the operator sees the numbers."""
    numbers = k[-2], v[-2]
    are_known = all(isinstance(one, int) for one in numbers)
    return are_same([*k[:-2], k[-1]], [*v[:-2], v[-1]]) and (
        not are_known or numbers[0] == numbers[1]
    )


def _steps_of(node: Node) -> list[Step]:
    """Return the steps from products with the keys to scores."""
    scale, mask = node.kwargs.get("scale"), node.kwargs.get("attn_mask")
    size = node.args[0].meta["val"].shape[-1]
    if scale is None and isinstance(size, int):
        scale = size**-0.5
    is_known = isinstance(scale, int | float)
    steps = [Step("scale", node, None, scale=float(scale) if is_known else None)]
    if mask is not None:
        steps.append(Step("add", node, None, other=mask))
    if _argument(node, 4, "is_causal"):
        steps.append(Step("causal", node, None))
    return steps


def _argument(node: Node, place: int, name: str) -> Any:  # noqa: ANN401 - a number
    """Return an argument of a node that is 0 where it is not given."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, 0)


def _reader_of(given: Node, *, may_repeat: bool) -> Any:  # noqa: ANN401 - a function
    """Return what says whether the operator reads an array in the place of keys or values."""

    def is_read(one: Factor) -> bool:
        if one.is_turned or not one.has_rows:
            return False
        shape, whole = one.node.meta["val"].shape, given.meta["val"].shape
        if may_repeat and _is_repeated(one.node):
            count, heads, repeats, *matrix = shape
            return are_same((count, heads * repeats, *matrix), whole)
        return are_same(shape, whole)

    return is_read


def _is_repeated(node: Node) -> bool:
    """Return whether an array is (b, heads, repeats, n, d), where repeats are the same memory."""
    value = node.meta["val"]
    return value.dim() == 5 and bool(statically_known_true(value.stride(2) == 0))


def _why_left(node: Node, arrays: list[Factor], own: list[Step]) -> str:
    """Return why attention cannot be computed by a kernel, if so."""
    q, k, v = (one.node.meta["val"] for one in arrays)
    if not isinstance(q.shape[-1], int):
        return "its head size is known when it runs, and a kernel is for one."
    if not _are_alike(k.shape, v.shape):
        return "k and v have different shapes."
    for name, one in zip(("q", "k", "v"), arrays, strict=True):
        if not one.has_rows:
            return f"{name} does not lie in dense rows, so it would have to be copied."
    others = [one for one in node.users if one.target is not getitem or one.args[1] != 0]
    if any(one.users for one in others):
        return "more is read of it than its result."
    return _why_not_so(node, own, is_square=statically_known_true(q.shape[-2] == k.shape[-2]))


def _why_not_so(node: Node, own: list[Step], *, is_square: bool) -> str:
    """Return why kernels do not compute such scores, if so."""
    if _argument(node, 3, "dropout_p") != 0:
        return "it has dropout."
    for step in own:
        if step.name == "scale" and step.scale is None:
            return "its scale is known when it runs."
        if step.name == "causal" and not is_square:
            return (
                "it is causal and has not as many rows as keys, or the number is known when it "
                "runs: in PyTorch, the first row sees one key; in kernels, the last sees all."
            )
        if (
            step.other is not None
            and step.other.meta["val"].dtype != node.args[0].meta["val"].dtype
        ):
            return f"its mask is of {step.other.meta['val'].dtype}, which q is not."
    return ""


def insert_attention(graph: Graph, attention: Attention, number: int) -> None:
    """Put the operator in the place of attention."""
    node = attention.node
    scale = next(one.scale for one in attention.own if one.scale is not None)
    mask = next((one.other for one in attention.own if one.other is not None), None)
    with graph.inserting_before(node):
        k, v = (
            new_node(graph, ATEN.select.int, (one, 2, 0)) if _is_repeated(one) else one
            for one in (attention.k, attention.v)
        )
        arguments = (attention.q, k, v, number, mask, scale)
        y = new_node(graph, torch.ops.gemm_tuner.attention.default, arguments)
    for result in list(node.users):
        result.replace_all_uses_with(y)
        graph.erase_node(result)
    graph.erase_node(node)
