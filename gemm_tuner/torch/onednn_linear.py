"""Products in f32 that no kernel computes, by oneDNN, where Inductor would have MKL compute them.

On CPUs that are not Intel's, MKL may be far slower: 128x768x3072, gelu and 128x3072x768 take 7.3 ms
by MKL and 2.6 by oneDNN (two threads of a Zen 5).
"""

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch._inductor.virtualized import V

from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.torch.asking import libraries_of_pytorch
from gemm_tuner.torch.graphs import Graph, new_node
from gemm_tuner.torch.products import Product
from gemm_tuner.torch.rewriting import weights

BY_ONEDNN = "oneDNN computes it here, where Inductor would call MKL."

_MKL = "mkl"
_PACK = "mkldnn::_reorder_linear_weight"


def is_left_to_mkl(product: Product, fastest: Collection[str]) -> bool:
    """Return whether Inductor has MKL compute a product of which others were the `fastest`.

    Ahead of time, and where rows are known when it runs, it calls oneDNN itself.
    """
    return (
        product.quantised is None
        and product.weight_only is None
        and product.batch is None
        and not product.is_image
        and isinstance(product.rows, int)
        and bool(fastest)
        and _MKL not in fastest
        and _MKL in libraries_of_pytorch(product.types)
        and detect_cpu().vendor != "GenuineIntel"
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not V.aot_compilation
    )


def compute_by_onednn(graph: Graph, product: Product) -> None:
    """Put oneDNN's operators in the place of a product; Inductor fuses what follows as it does."""
    _let_shapes_be_known()
    node, ops = product.node, torch.ops.mkldnn
    with graph.inserting_before(node):
        w = weights(graph, product, product.w)
        pack, multiply = ops._reorder_linear_weight, ops._linear_pointwise  # noqa: SLF001 - so called
        packed = new_node(graph, pack.default, (w, product.rows))
        arguments: tuple[Any, ...] = (product.x, packed, product.bias, "none", [], "")
        y = new_node(graph, multiply.default, arguments)
    node.replace_all_uses_with(y)
    graph.erase_node(node)


@cache
def _let_shapes_be_known() -> None:
    """Tell PyTorch the shape of what packs weights, which it has not been told by itself.

    It is looked at between the pass and the freezing that computes it.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(_PACK, "Meta"):  # noqa: SLF001 - no other
        torch.library.register_fake(_PACK)(lambda w, _rows=None: torch.empty_like(w))
