"""The steps after a product that kernels may have, and the text of an epilogue with them."""

from collections.abc import Sequence
from dataclasses import replace

from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.torch.inductor.activations import Activations
from gemm_tuner.torch.inductor.attention import Attention
from gemm_tuner.torch.inductor.epilogues import Step, steps_after
from gemm_tuner.torch.inductor.groups import Groups
from gemm_tuner.torch.inductor.products import Product
from gemm_tuner.torch.inductor.weight_only import WeightOnly

OfActivations = Activations | Attention | Groups
AnyProduct = Product | OfActivations

# What the operators read after a product: a layer of its own, or one of a batch, bytes or an image.
_OF_PLAIN = frozenset({"add", "channel_scale", "bias"})
_OF_OTHERS = frozenset({"add"})


def steps_of(product: AnyProduct) -> list[Step]:
    """Return the steps after a product that kernels may have."""
    if isinstance(product, OfActivations):
        return product.steps()
    if product.quantised is not None:
        return steps_after(product.node, is_quantised=True)
    is_plain = product.batch is None and not isinstance(product.weight_only, WeightOnly)
    return steps_after(product.node, operands=_OF_PLAIN if is_plain else _OF_OTHERS)


def with_steps(wanted: WantedLayer, product: AnyProduct, steps: Sequence[Step]) -> WantedLayer:
    """Return the layer with steps after it, which may make bytes of y."""
    requantisation = steps[-1].requantisation if steps else None
    dtype = product.types
    if isinstance(product, Product) and product.quantised and requantisation is not None:
        dtype = f"{product.quantised.types}_{requantisation.type}"
    return replace(wanted, dtype=dtype, epilogue=chain(product, steps))


def chain(product: AnyProduct, steps: Sequence[Step]) -> str:
    """Return the text of an epilogue."""
    if isinstance(product, OfActivations):
        return "+".join(step.name for step in (*product.own, *steps)) or "none"
    first = [] if product.quantised is None else ["x_zero_point", "channel_scale"]
    bias = [] if product.bias is None else ["bias"]
    return "+".join([*first, *bias, *(step.name for step in steps)]) or "none"
