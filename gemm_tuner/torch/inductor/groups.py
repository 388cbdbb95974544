"""Products of groups of rows in a graph of Inductor, as of experts, and the operator for them."""

from dataclasses import dataclass
from typing import Any

import torch

from gemm_tuner.domain.operation import Operation
from gemm_tuner.torch.asking import rows_up_to
from gemm_tuner.torch.inductor.activations import Factor, deepest
from gemm_tuner.torch.inductor.epilogues import Step
from gemm_tuner.torch.inductor.graphs import ATEN, Graph, Node, new_node
from gemm_tuner.torch.inductor.products import are_of_one_type, module_of
from gemm_tuner.torch.operators import TYPES

# What `grouped_mm` becomes, and what `transformers` calls in its place where a model is in f32.
_TARGETS = frozenset({"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"})

_ARGUMENTS = ("x", "w", "offs", "bias", "out_dtype")

# Groups have different sizes: how many times the mean a kernel is asked for.
_OVER_MEAN = 2


@dataclass(frozen=True, slots=True)
class Groups:
    """Products of groups of rows: y (rows, n) = x (rows, k) @ w (group, k, n), of each its own.

    `node` computes them. The rows of each group end where `ends` says. `w_layout` says how w lies.
    It is left as it is where it says why.
    """

    node: Node
    name: str
    x: Node
    w: Factor
    ends: Node
    w_layout: str
    why_left: str = ""
    own: tuple[Step, ...] = ()
    operation: str = Operation.MATMUL.value
    batch: None = None  # how many groups have rows is known when it runs

    @property
    def rows(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of rows of all groups."""
        return self.x.meta["val"].shape[0]

    @property
    def likely_rows(self) -> tuple[int | str, ...]:
        """Return how many rows a group is likely to have; none where those of all are not known."""
        if not isinstance(self.rows, int):
            return ()
        mean = -(-self.rows // self.w.node.meta["val"].shape[0])
        return rows_up_to(_OVER_MEAN * mean)

    @property
    def types(self) -> str:
        """Return the type of x, w and y."""
        return TYPES[self.node.meta["val"].dtype]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return n and k."""
        return self.node.meta["val"].shape[-1], self.x.meta["val"].shape[-1]

    def steps(self) -> list[Step]:
        """Return no steps: what comes after is of all groups."""
        return []


def groups_of_rows(node: Node) -> Groups | None:
    """Return the products of groups that a node computes, None if kernels read no such arrays."""
    if str(node.target) not in _TARGETS:
        return None
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    x, w, ends = node.args[0], node.args[1], given.get("offs")
    if ends is None or given.get("bias") is not None or given.get("out_dtype") is not None:
        return None
    values = [one.meta.get("val") for one in (x, w, node)]
    if not are_of_one_type(values) or [value.dim() for value in values] != [2, 3, 2]:
        return None
    if any(isinstance(one, int) and one == 0 for value in values for one in value.shape):
        return None
    factor = deepest(w, lambda one: one.has_rows or one.has_columns)
    return Groups(
        node=node,
        name=module_of(node),
        x=x,
        w=factor,
        ends=ends,
        w_layout=factor.layout,
        why_left=_why_left(node, x, factor),
    )


def _why_left(node: Node, x: Node, w: Factor) -> str:
    """Return why the products cannot be computed by a kernel, if so."""
    for name, length in (("n", node.meta["val"].shape[-1]), ("k", x.meta["val"].shape[-1])):
        if not isinstance(length, int):
            return f"its {name} is known when it runs, and a kernel is for one {name}."
    if not (w.has_rows or w.has_columns):
        return "w lies in no dense rows or columns, so it would have to be copied."
    return ""


def insert_groups(graph: Graph, groups: Groups, number: int) -> None:
    """Put the operator in the place of the products."""
    node, w = groups.node, groups.w.node
    with graph.inserting_before(node):
        if groups.w.is_turned != (groups.w_layout == "nk"):
            w = new_node(graph, ATEN.permute.default, (w, [0, 2, 1]))
        arguments = (groups.x, w, groups.ends, number)
        y = new_node(graph, torch.ops.gemm_tuner.grouped_matmul.default, arguments)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
