"""Quantised models of PyTorch for tests."""

from typing import Any

import torch


def quantised(
    model: Any,  # noqa: ANN401 - a module
    x: Any,  # noqa: ANN401 - a tensor
    *,
    is_dynamic: bool = False,
    is_qat: bool = False,
) -> Any:  # noqa: ANN401 - a module
    """Return a model whose layers multiply bytes, as PyTorch's documentation makes one.

    Seven bits of a byte are used, so that a library that adds two products in 16 bits is right.
    """
    # It imports Inductor, which warns: not while tests are collected.
    from torchao.quantization.pt2e import quantize_pt2e  # noqa: PLC0415
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: PLC0415

    exported = torch.export.export(model, (x,)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(
        x86.get_default_x86_inductor_quantization_config(
            is_dynamic=is_dynamic, is_qat=is_qat, reduce_range=True
        )
    )
    prepared = (quantize_pt2e.prepare_qat_pt2e if is_qat else quantize_pt2e.prepare_pt2e)(
        exported, quantizer
    )
    prepared(x)
    return quantize_pt2e.convert_pt2e(prepared)


class Layers(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Layers with a function, a sum, a function without bias, and nothing after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)
        self.third, self.last = torch.nn.Linear(24, 40, bias=False), torch.nn.Linear(40, 10)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        y = self.second(torch.nn.functional.relu(self.first(x))) + x
        return self.last(torch.nn.functional.silu(self.third(y)))
