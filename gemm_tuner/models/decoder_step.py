"""A step of a decoder as a module whose inputs are plain tensors."""

from typing import Any

import torch
from transformers import DynamicCache


class WithPast(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A step of a decoder: the next token, beside the keys and values of those before it.

    These, (layers, batch, heads, tokens, width), go with each call, so that all compute the same.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a module
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Any,  # noqa: ANN401 - tensors
        attention_mask: Any,  # noqa: ANN401 - tensors
        keys: Any,  # noqa: ANN401 - tensors
        values: Any,  # noqa: ANN401 - tensors
    ) -> Any:  # noqa: ANN401 - tensors
        """Return (batch, 1, width)."""
        cache = DynamicCache(config=self.model.config)
        for place, layer in enumerate(cache.layers):
            layer.lazy_initialization(keys[place], values[place])
            layer.keys, layer.values = keys[place], values[place]  # an update adds to an empty one
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            use_cache=True,
        )[0]
