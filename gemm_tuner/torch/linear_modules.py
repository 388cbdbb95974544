"""Which modules are linear layers, and of what sizes: PyTorch's, and `Conv1D` of transformers."""

from typing import Any

import torch

CONV1D = "transformers.pytorch_utils", "Conv1D"  # what GPT-2 has for linear layers


def is_conv1d(module: Any) -> bool:  # noqa: ANN401 - a module
    """Return whether a module is a `Conv1D`, perhaps one that calls a tuned kernel."""
    return any((one.__module__, one.__name__) == CONV1D for one in type(module).__mro__)


def is_linear(module: Any) -> bool:  # noqa: ANN401 - a module
    """Return whether a module is a linear layer."""
    return isinstance(module, torch.nn.Linear) or is_conv1d(module)


def sizes_of(module: Any) -> tuple[int, int]:  # noqa: ANN401 - a module
    """Return n and k of a linear layer; a lazy one has them from its first call on."""
    if is_conv1d(module):
        return module.nf, module.nx
    return module.out_features, module.in_features
