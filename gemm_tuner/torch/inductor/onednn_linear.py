"""Products in f32 that no kernel computes, by oneDNN, where Inductor would have MKL compute them.

On CPUs that are not Intel's, MKL may be far slower: 128x768x3072, gelu and 128x3072x768 take 7.3 ms
by MKL and 2.6 by oneDNN (two threads of a Zen 5).
"""

import math
from collections.abc import Collection

import torch
from torch._inductor.virtualized import V

from gemm_tuner.torch.asking import is_left_to_mkl
from gemm_tuner.torch.inductor.graphs import Graph, new_node
from gemm_tuner.torch.inductor.products import Product
from gemm_tuner.torch.inductor.rewriting import weights

BY_ONEDNN = "oneDNN computes it here, where Inductor would call MKL."


def is_by_onednn(product: Product, fastest: Collection[str]) -> bool:
    """Return whether oneDNN shall compute a product of which others than MKL were the `fastest`.

    Ahead of time, and where rows are known when it runs, it calls oneDNN itself.
    """
    return (
        product.quantised is None
        and product.weight_only is None
        and product.batch is None
        and not product.is_image
        and isinstance(product.rows, int)
        and is_left_to_mkl(product.types, 2 * product.rows * math.prod(product.sizes), fastest)
        and not V.aot_compilation
    )


def compute_by_onednn(graph: Graph, product: Product) -> None:
    """Put a product by oneDNN in the place of one; its weights are packed when they are frozen."""
    node, ops = product.node, torch.ops.gemm_tuner
    n, _k = product.sizes
    with graph.inserting_before(node):
        w = weights(graph, product, product.w)
        packed = new_node(graph, ops.onednn_pack.default, (w, product.rows))
        y = new_node(graph, ops.onednn_linear.default, (product.x, packed, product.bias, n))
    node.replace_all_uses_with(y)
    graph.erase_node(node)
