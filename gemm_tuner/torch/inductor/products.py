"""Products with constant weights in a graph of Inductor."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gemm_tuner.torch.inductor.convolutions import Convolution, Window, convolution_of
from gemm_tuner.torch.inductor.epilogues import past_views
from gemm_tuner.torch.inductor.four_bits import FourBits, can_be_read, four_bits_of
from gemm_tuner.torch.inductor.graphs import ATEN, CASTS, SHOWS, Graph, Node, untransposed
from gemm_tuner.torch.inductor.quantised import (
    MOST_SUMMED,
    Quantised,
    quantised_of,
    why_not_as_bytes,
)
from gemm_tuner.torch.inductor.weight_only import WeightOnly, scaled_after
from gemm_tuner.torch.operators import TYPES

# How Dynamo writes the model at the head of a path.
_ROOT = re.compile(r"^L\['\w+'\]\.?")

_BATCH_DIMENSIONS = 3
_FOLDED = CASTS | SHOWS | {ATEN.clone.default}


@dataclass(frozen=True, slots=True)
class Product:
    """A product with constant weights: y (rows, n) = x (rows, k) @ w.T + bias.

    `node` computes it. The node of the weights is w (n, k), or (k, n) where `is_transposed`. `name`
    is the path of its module, or of those of several that were joined.

    Of a convolution, x is (count, channels, height, width), w (n, channels, height, width), and y
    (count, n, height, width). Where its `window` is a pixel, x and y have channels last, so that
    their elements lie in rows of k and n; else the rows of x are patches that are copied first.

    A product is left as it is where it says why.

    Of a batch, x is (batch, rows, k), y (batch, rows, n) and w (batch, n, k), or (batch, k, n); the
    bias has n elements, or as many for each.

    Of one that is `quantised`, x and w are the floats that were made of bytes. Of one that is
    `weight_only`, w is bytes as floats, which the node that computes it has scaled, or elements of
    4 bits as PyTorch packs them.
    """

    node: Node
    name: str
    x: Node
    w: Node
    bias: Node | None
    is_transposed: bool
    why_left: str = ""
    quantised: Quantised | None = None
    weight_only: WeightOnly | FourBits | None = None
    window: Window | None = None

    @property
    def is_image(self) -> bool:
        """Return whether this is a convolution."""
        return self.window is not None

    @property
    def has_patches(self) -> bool:
        """Return whether this is a convolution whose patches are copied."""
        return self.window is not None and not self.window.is_pixel

    @property
    def batch(self) -> Any:  # noqa: ANN401 - a number; of w that is not constant, any
        """Return the number of products of a batch, None where this is one product."""
        shape = self.w.meta["val"].shape
        return shape[0] if len(shape) == _BATCH_DIMENSIONS else None

    @property
    def rows(self) -> Any:  # noqa: ANN401 - a number, or one that is known when it runs
        """Return the number of rows of x and y, or of each in a batch."""
        shape = (self.node if self.is_image else self.x).meta["val"].shape
        if self.batch is not None:
            return shape[1]
        count, _columns, *lengths = shape
        return count * math.prod(lengths)

    @property
    def types(self) -> str:
        """Return the types of x, w, the sums and y."""
        if self.quantised is not None:
            return f"{self.quantised.types}_f32"
        dtype = TYPES[self.x.meta["val"].dtype]
        w = self.weight_only
        return dtype if w is None else f"{dtype}_{w.w_type}_f32_{dtype}"

    @property
    def w_layout(self) -> str:
        """Return how the weights lie: those of integers alone have scales for groups of them."""
        return "nk" if self.weight_only is None else self.weight_only.w_layout

    @property
    def sizes(self) -> tuple[int, int]:
        """Return n and k."""
        if self.weight_only is not None:
            return self.weight_only.sizes
        shape = self.w.meta["val"].shape
        if self.is_image:
            return shape[0], math.prod(shape[1:])
        first, second = shape[-2:] if self.batch is not None else shape
        return (second, first) if self.is_transposed else (first, second)


def products_of(nodes: Iterable[Node], constants: frozenset[Node]) -> list[Product]:
    """Return the products with constant weights that nodes compute, if kernels could."""
    return [product for node in nodes if (product := _product_of(node, constants)) is not None]


def _product_of(node: Node, constants: frozenset[Node]) -> Product | None:
    product = _of_four_bits(node, constants) or _of_floats(node, constants)
    return product if product is not None and _can_be_read(product) else None


def _of_four_bits(node: Node, constants: frozenset[Node]) -> Product | None:
    """Return a product by constant weights of 4 bits, None where it is none."""
    found = four_bits_of(node)
    if found is None or not constants.issuperset((found.packed, found.scale_and_added)):
        return None
    return Product(
        node,
        module_of(node),
        node.args[0],
        found.packed,
        None,
        is_transposed=False,
        why_left="" if can_be_read() else "this CPU's order of packed weights is not known.",
        weight_only=found,
    )


def _of_floats(node: Node, constants: frozenset[Node]) -> Product | None:
    """Return a product of floats, or of bytes that floats were made of."""
    name, convolution = module_of(node), convolution_at(node)
    if node.target is ATEN.addmm.default and not node.kwargs:
        bias, x, w_t = node.args
        w = untransposed(w_t)
    elif node.target is ATEN.mm.default:
        (x, w_t), bias = node.args, None
        w = untransposed(w_t)
    elif convolution is not None:
        x, w, bias, *_how = node.args
    elif node.target in (ATEN.bmm.default, ATEN.baddbmm.default) and not node.kwargs:
        (x, w_t), bias = node.args[-2:], node.args[0] if len(node.args) > 2 else None
        w = untransposed(w_t)
        if bias is None:
            node, bias = _with_bias(node)
    else:
        return None
    given = (
        Product(node, name, x, w_t, bias, is_transposed=True)
        if w is None
        else Product(node, name, x, w, bias, is_transposed=False)
    )
    if convolution is not None:
        given = replace(given, window=convolution.window, why_left=convolution.why_left)
    if not is_constant(given.w, constants):
        return _quantised(given, constants)
    if node.target is ATEN.mm.default:
        return _with_scales(given, w_t, constants)
    return given


def convolution_at(node: Node) -> Convolution | None:
    """Return the convolution of images that a node computes, None if it is none."""
    if node.target is not ATEN.convolution.default:
        return None
    x, w, *_how = node.args
    return convolution_of(node.args, [one.meta.get("val") for one in (x, w, node)])


def _with_scales(product: Product, w_t: Node, constants: frozenset[Node]) -> Product:
    """Return a product with the scales of its weights, where these are bytes."""
    found = scaled_after(product.node, w_t, lambda one: is_constant(one, constants))
    if found is None:
        return product
    return replace(product, node=found.node, bias=found.bias, weight_only=found.weight_only)


def _quantised(product: Product, constants: frozenset[Node]) -> Product | None:
    """Return a product of constant weights of bytes, None where it is none."""
    is_linear = not product.is_image and product.batch is None
    quantised = None
    if is_linear and not product.is_transposed:
        quantised = quantised_of(product.x, product.w, constants)
    if quantised is None:
        why = why_not_as_bytes(product.x, product.w, constants)
        if why and not is_linear:
            why = "it is a convolution or a batch of bytes."
        return replace(product, why_left=why) if why else None
    k = product.sizes[1]
    why_left = (
        f"its k is {k}, and 32 bits hold the sum of at most {MOST_SUMMED} products of bytes."
        if k > MOST_SUMMED
        else ""
    )
    return replace(product, quantised=quantised, why_left=why_left)


def _with_bias(node: Node) -> tuple[Node, Node | None]:
    """Return what adds a bias to a batch of products, and this, where that is all that follows."""
    head = past_views(node)
    if len(head.users) == 1:
        [added] = head.users
        others = [one for one in added.args if one is not head]
        if added.target is ATEN.add.Tensor and not added.kwargs and len(others) == 1:
            values = [one.meta.get("val") for one in (node, added)]
            is_alike = (
                None not in values
                and values[0].shape == values[1].shape
                and values[0].dtype == values[1].dtype
            )
            if is_alike and _is_bias_of_batch(others[0], node):
                return added, others[0]
    return node, None


def _is_bias_of_batch(bias: Any, node: Node) -> bool:  # noqa: ANN401 - a node, or a number
    """Return whether something has n elements for all products of a batch, or n for each."""
    value = bias.meta.get("val") if isinstance(bias, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not 1 <= value.dim() <= _BATCH_DIMENSIONS:
        return False
    if value.dtype != node.meta["val"].dtype:
        return False
    batch, _rows, n = node.meta["val"].shape
    many, rows, columns = (1, 1, *value.shape)[-_BATCH_DIMENSIONS:]
    return many in (1, batch) and rows == 1 and columns == n


def are_of_one_type(values: Sequence[Any]) -> bool:
    """Return whether all are tensors of this CPU of one type, which kernels read."""
    if any(type(one).__name__ != "FakeTensor" or one.device.type != "cpu" for one in values):
        return False
    types = {one.dtype for one in values}
    return len(types) == 1 and types <= TYPES.keys()


def _can_be_read(product: Product) -> bool:
    """Return whether kernels read arrays of these types and shapes."""
    w = () if isinstance(product.weight_only, FourBits) else (product.w,)
    arrays = (product.x, *w, product.bias)
    values = [one.meta.get("val") for one in arrays if one is not None]
    if not are_of_one_type(values):
        return False
    count, *lengths = values[0].shape
    if product.batch is not None:
        if product.bias is not None and not _is_bias_of_batch(product.bias, product.node):
            return False
        if _is_repeated(product.w):
            return False
        count, *lengths = lengths
    sizes = (*product.sizes, lengths[0])
    if any(isinstance(one, torch.SymInt) or one == 0 for one in sizes):
        return False
    is_vector = (
        product.bias is None or product.batch is not None or tuple(values[-1].shape) == sizes[:1]
    )
    return is_vector and all(isinstance(one, torch.SymInt) or one > 0 for one in (count, *lengths))


def _is_repeated(w: Node) -> bool:
    """Return whether weights show some elements more than once, and so would be packed as often."""
    elements, node = w.meta["val"].numel(), w
    while node.op == "call_function":
        node = node.args[0]
        value = node.meta.get("val")
        if value is not None and not statically_known_true(value.numel() >= elements):
            return True
    return False


def is_constant(node: Node, constants: frozenset[Node]) -> bool:
    """Return whether a node is a constant, or shows or casts one: freezing computes it then."""
    while node not in constants:
        if node.op != "call_function" or node.target not in _FOLDED:
            return False
        node = node.args[0]
    return True


def is_inner(graph: Graph) -> bool:
    """Return whether a graph is that of a branch or a loop: freezing leaves it."""
    context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
    if context is None or context.fw_metadata is None:
        return False
    return not all("desc" in one.meta for one in graph.find_nodes(op="placeholder"))


def constants_of(graph: Graph) -> frozenset[Node]:
    """Return the nodes that freezing makes constants: the parameters that nothing changes."""
    constants = set(graph.find_nodes(op="get_attr"))
    context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
    if context is None or not context.params_flat_unwrap_subclasses or context.fw_metadata is None:
        return frozenset(constants)
    metadata = context.fw_metadata
    placeholders = graph.find_nodes(op="placeholder")
    if is_inner(graph):
        return frozenset()
    changed = {place for place, one in enumerate(metadata.input_info) if one.mutates_data} | {
        one.base_idx for one in metadata.output_info if one.base_idx is not None
    }
    parameters = context.params_flat_unwrap_subclasses
    return frozenset(
        constants
        | {
            node
            for place, (node, _one) in enumerate(zip(placeholders, parameters, strict=False))
            if place not in changed
        }
    )


def module_of(node: Node) -> str:
    """Return the path of the module that a node comes from, or the name of the node."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    path = _ROOT.sub("", str(modules[-1][0])) if modules else ""
    return path or str(node.name)
