"""Products with weights of 4 bits in a graph, as torchao leaves them to PyTorch's operator.

`_weight_int4pack_mm_for_cpu` computes `x @ w.T` with w = (element - 8) * scale + added: elements
from 0 to 15, and a scale and what is added for each group along k. It reads the elements in an
order of its own, which follows from the CPU. Kernels read them in order, with the zero point
8 - added / scale.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.torch.inductor.graphs import ATEN, PRIMS, Graph, Node, are_same, as_floats, new_node

PRODUCT = ATEN._weight_int4pack_mm_for_cpu.default  # noqa: SLF001 - so called
_PACK = ATEN._convert_weight_to_int4pack_for_cpu.default  # noqa: SLF001
_INNER_TILES = 1  # counts on GPUs only
_MIDDLE = 8
_VANISHING, _TINY = 2.0**-100, 2.0**-120
_BITS = 4
_END = 2**63 - 1  # of a slice that ends where its array does
_ALL = (0, None, None, 1)  # what a slice takes by default
# The operator packs as many rows of w together at most, whatever the CPU, and panels one by one.
_PANEL = 64


@dataclass(frozen=True, slots=True)
class FourBits:
    """Weights (n, k) of 4 bits as they are packed, and (groups, n, 2) scales and what is added."""

    packed: Node
    group: int
    scale_and_added: Node
    sizes: tuple[int, int]
    view: None = None

    w_type = "u4"

    @property
    def w_layout(self) -> str:
        """Return how the weights lie, and in which groups."""
        return f"nk:g{self.group}"

    def read(self, graph: Graph) -> tuple[Node, Node, Node]:
        """Return the elements (n, k / 2), and the scales and zero points (n, groups)."""
        ours = torch.ops.gemm_tuner
        of_groups = new_node(graph, ours.groups_of_int4.default, (self.scale_and_added,))
        return (
            new_node(graph, ours.elements_of_int4.default, (self.packed, *self.sizes)),
            new_node(graph, ATEN.select.int, (of_groups, 0, 0)),
            new_node(graph, ATEN.select.int, (of_groups, 0, 1)),
        )

    def plain(self, graph: Graph, _w: Node) -> Node:
        """Return the weights that the elements stand for (n, k), in the type of the scales."""
        packed, *of_groups = self.read(graph)
        n, k = self.sizes
        halves = [
            new_node(graph, ATEN.bitwise_and.Scalar, (packed, 15)),
            new_node(graph, ATEN.__rshift__.Scalar, (packed, _BITS)),
        ]
        elements = new_node(graph, ATEN.stack.default, (halves, 2))
        shape = [n, k // self.group, self.group]
        grouped = as_floats(graph, new_node(graph, ATEN.reshape.default, (elements, shape)))
        scales, zero_points = (
            new_node(graph, ATEN.unsqueeze.default, (one, 2)) for one in of_groups
        )
        centred = new_node(graph, ATEN.sub.Tensor, (grouped, zero_points))
        scaled = new_node(graph, ATEN.mul.Tensor, (centred, scales))
        floats = new_node(graph, ATEN.reshape.default, (scaled, [n, k]))
        wanted = self.scale_and_added.meta["val"].dtype
        return new_node(graph, PRIMS.convert_element_type.default, (floats, wanted))


def four_bits_of(node: Node) -> FourBits | None:
    """Return the weights of 4 bits that a node multiplies by, None of another node."""
    if node.target is not PRODUCT or node.kwargs:
        return None
    x, packed, group, scale_and_added = node.args
    n, k = node.meta["val"].shape[-1], x.meta["val"].shape[-1]
    shapes = tuple(packed.meta["val"].shape), tuple(scale_and_added.meta["val"].shape)
    if not isinstance(k, int) or shapes != ((n, k // 2), (k // group, n, 2)) or k % group:
        return None
    if scale_and_added.meta["val"].dtype != x.meta["val"].dtype:
        return None
    return FourBits(packed, group, scale_and_added, (n, k))


def without_whole_slices(graph: Graph) -> None:
    """Take out what shows or writes all elements of y, and asks for its rows, after such products.

    torchao cuts off columns that were added to w, where there may be none, and adds a bias in
    place. Inductor takes these out later. The rows of y are those of x.
    """
    products = graph.find_nodes(op="call_function", target=PRODUCT)
    if not products:
        return
    for node in list(graph.nodes):
        source = _shown_whole(node)
        if source is not None and source.op == "call_function":
            node.replace_all_uses_with(source, lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)
    for product in products:
        for user in list(product.users):
            if user.target is ATEN.sym_size.int and user.args[1] == 0:
                user.replace_input_with(product, product.args[0])


def _shown_whole(node: Node) -> Node | None:
    """Return the node all of whose elements another shows, None where it does something else."""
    if node.target is ATEN.alias.default:
        return node.args[0]
    if node.target not in (ATEN.slice.Tensor, ATEN.slice_scatter.default) or node.kwargs:
        return None
    given, *where = node.args
    written = where.pop(0) if node.target is ATEN.slice_scatter.default else given
    begin, end, step = [*where, *_ALL[len(where) :]][1:]
    if begin not in (None, 0) or end not in (None, _END) or step != 1:
        return None
    values = [one.meta.get("val") for one in (given, written)]
    is_same = None not in values and are_same(values[0].shape, values[1].shape)
    return written if is_same and values[0].dtype == values[1].dtype else None


@cache
def can_be_read() -> bool:
    """Return whether the elements that the operator packs are found again on this CPU."""
    sizes = 2 * _PANEL + 16, 128
    with _disable_current_modes():
        random = torch.Generator().manual_seed(0)
        elements = torch.randint(16, sizes, generator=random, dtype=torch.int32)
        found = elements_of_int4(_PACK(elements, _INNER_TILES), *sizes)
        return bool(torch.equal(found, _in_pairs(elements.to(torch.uint8))))


def elements_of_int4(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Return elements of 4 bits that PyTorch packed in order, two in a byte: (n, k / 2)."""
    whole = n // _PANEL * _PANEL
    panels = [(whole, _PANEL), (n - whole, n - whole)]
    rows, begin = [], 0
    for count, height in panels:
        if count:
            part = packed[begin : begin + count].reshape(count // height, -1)
            halves = torch.stack((part & 15, part >> _BITS), 2).flatten(1)
            rows.append(halves[:, _places(height, k)].view(count, k))
            begin += count
    return _in_pairs(torch.cat(rows))


def _shape_of_elements(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return packed.new_empty((n, k // 2))


def groups_of_int4(scale_and_added: torch.Tensor) -> torch.Tensor:
    """Return the scales and the zero points of groups: (2, n, groups)."""
    scales, added = scale_and_added.permute(2, 1, 0).to(torch.float32).unbind()
    # What is added is divided by the scale, so that this is not too small, as where a group is of
    # one number: elements times a scale that vanishes beside what is added may have any.
    least = added.abs() * _VANISHING + _TINY
    scales = torch.where(scales.abs() < least, least, scales)
    return torch.stack((scales, _MIDDLE - added / scales))


def _shape_of_groups(scale_and_added: torch.Tensor) -> torch.Tensor:
    groups, n, _two = scale_and_added.shape
    return scale_and_added.new_empty((2, n, groups), dtype=torch.float32)


# Computed once, when weights are frozen.
for _function, _shape in (
    (elements_of_int4, _shape_of_elements),
    (groups_of_int4, _shape_of_groups),
):
    torch.library.custom_op(
        f"gemm_tuner::{_function.__name__}", _function, mutates_args=()
    ).register_fake(_shape)


def _in_pairs(elements: torch.Tensor) -> torch.Tensor:
    return elements[:, ::2] | elements[:, 1::2] << _BITS


def _places(rows: int, k: int) -> torch.Tensor:
    """Return the place, in halves of bytes, where the operator packs each element of a panel.

    The elements' numbers are packed in its place, 4 bits at a time.
    """
    numbers = torch.arange(rows * k, dtype=torch.int32).view(rows, k)
    number_at = torch.zeros(rows * k, dtype=torch.int64)
    for shift in range(0, (rows * k).bit_length(), _BITS):
        packed = _PACK(numbers >> shift & 15, _INNER_TILES).flatten()
        halves = torch.stack((packed & 15, packed >> _BITS), 1).flatten()
        number_at |= halves.to(torch.int64) << shift
    return torch.argsort(number_at)
