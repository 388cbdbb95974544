"""The operators in the place of a product and of the steps after it."""

from collections.abc import Sequence

import torch

from gemm_tuner.torch.inductor.epilogues import Step
from gemm_tuner.torch.inductor.graphs import ATEN, Graph, Node, as_floats, new_node
from gemm_tuner.torch.inductor.products import Product
from gemm_tuner.torch.inductor.quantised import Number
from gemm_tuner.torch.operators import OperatorLayer


def insert(
    graph: Graph, product: Product, layer: OperatorLayer, steps: Sequence[Step], *, is_whole: bool
) -> None:
    """Put the operators in the place of a product and the steps after it.

    The plain weights stay if there are rows that no kernel is for.
    """
    last = steps[-1].result if steps else product.node
    with graph.inserting_before(last):
        y = _product(graph, product, layer, steps, is_whole=is_whole)
        if product.is_image:
            y = _image(graph, product, y)
        elif (view := _view_of(product, steps)) is not None:
            y = new_node(graph, ATEN.reshape.default, (y, view.args[1]))
    last.replace_all_uses_with(y)
    graph.erase_node(last)


def _view_of(product: Product, steps: Sequence[Step]) -> Node | None:
    """Return the node that gave y its shape, None where that is of rows and columns."""
    if steps and steps[-1].view is not None:
        return steps[-1].view
    return None if product.weight_only is None else product.weight_only.view


def _product(
    graph: Graph, product: Product, layer: OperatorLayer, steps: Sequence[Step], *, is_whole: bool
) -> Node:
    ops, weight_only, quantised = torch.ops.gemm_tuner, product.weight_only, product.quantised
    w: Node = quantised.w if quantised is not None else None
    of_groups: list[Node] = []
    elements = w
    if weight_only is not None:
        elements, *of_groups = weight_only.read(graph)
        w = None if is_whole else weight_only.plain(graph, weights(graph, product, product.w))
    elif quantised is None:
        elements = w = weights(graph, product, product.w)
    read = elements, layer.packed_bytes, layer.number, *of_groups
    packed = new_node(graph, ops.pack.default, read)
    rest = [] if is_whole else [w]
    arguments: list[object]
    if quantised is None and (short := _bias_and_other(graph, product, steps)) is not None:
        bias, other = short
        x = _rows_of_x(graph, product)
        arguments = [x, packed, bias, layer.number]
        if other is not None or rest:
            arguments.append(other)
        return new_node(graph, ops.linear.default, (*arguments, *rest))
    operands = _operands(graph, product, steps)
    x = _rows_of_x(graph, product) if quantised is None else quantised.x.placed(graph)
    arrays = [one if isinstance(one, torch.fx.Node) else None for one in operands]
    numbers = [0.0 if isinstance(one, torch.fx.Node) else float(one) for one in operands]
    arguments = [x, packed, arrays, numbers, layer.number]
    return new_node(graph, ops.fused_linear.default, (*arguments, *rest))


def _bias_and_other(
    graph: Graph, product: Product, steps: Sequence[Step]
) -> tuple[Node | None, Node | None] | None:
    """Return the bias and the other array that a product reads, None if it reads more."""
    read = {step.name: step.other for step in steps if step.other is not None}
    bias = _bias(graph, product)
    if not read.keys() <= {"bias", "add"} or (bias is not None and "bias" in read):
        return None
    other = _rows(graph, product, read["add"]) if "add" in read else None
    return read.get("bias", bias), other


def _operands(graph: Graph, product: Product, steps: Sequence[Step]) -> list[Number]:
    """Return what each step that reads something reads, in the order of the chain."""
    read: list[Number] = []
    if (quantised := product.quantised) is not None:
        read = [quantised.x.zero_point, quantised.channel_scale(graph)]
    if product.bias is not None:
        read.append(product.bias)
    for step in steps:
        if step.name == "channel_scale":
            read.append(as_floats(graph, step.other))
        elif step.name == "bias":
            read.append(step.other)
        elif step.other is not None:
            read.append(_rows(graph, product, step.other))
        if step.requantisation is not None:
            read += [1.0 / step.requantisation.scale, step.requantisation.zero_point]
    return read


def weights(graph: Graph, product: Product, w: Node) -> Node:
    """Return the weights (n, k) of a product, of a node like that of its own."""
    if product.is_image:
        if product.has_patches:  # whose channels lie side by side
            w = new_node(graph, ATEN.permute.default, (w, [0, 2, 3, 1]))
        return new_node(graph, ATEN.reshape.default, (w, list(product.sizes)))
    order = [1, 0] if product.batch is None else [0, 2, 1]
    return new_node(graph, ATEN.permute.default, (w, order)) if product.is_transposed else w


def _bias(graph: Graph, product: Product) -> Node | None:
    """Return the bias of n elements, or of a batch as many for each product."""
    if product.bias is None or product.batch is None:
        return product.bias
    n, _k = product.sizes
    is_own = product.bias.meta["val"].numel() > n
    shape = [product.batch, n] if is_own else [n]
    return new_node(graph, ATEN.reshape.default, (product.bias, shape))


def _rows_of_x(graph: Graph, product: Product) -> Node:
    window = product.window
    if window is None:
        return product.x
    if window.is_pixel:
        return _rows(graph, product, product.x)
    return new_node(graph, torch.ops.gemm_tuner.patches.default, (product.x, *window.arguments))


def _rows(graph: Graph, product: Product, node: Node) -> Node:
    """Return an array as a matrix, or a batch: one of channels last keeps its place in memory."""
    if product.is_image:
        node = new_node(graph, ATEN.permute.default, (node, [0, 2, 3, 1]))
    columns = node.meta["val"].shape[-1]
    batch = [] if product.batch is None else [product.batch]
    return new_node(graph, ATEN.reshape.default, (node, [*batch, -1, columns]))


def _image(graph: Graph, product: Product, y: Node) -> Node:
    value = product.node.meta["val"]
    _count, n, height, width = value.shape
    y = new_node(graph, ATEN.reshape.default, (y, [-1, height, width, n]))
    y = new_node(graph, ATEN.permute.default, (y, [0, 3, 1, 2]))
    if value.is_contiguous(memory_format=torch.channels_last):
        return y
    how = {"memory_format": torch.contiguous_format}
    return new_node(graph, ATEN.clone.default, (y,), how)
