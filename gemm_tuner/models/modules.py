"""Modules of PyTorch that no package has, or whose inputs and outputs are plain tensors."""

from itertools import pairwise
from typing import Any

import torch


class OfTokens(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A model of transformers that reads tokens, and returns the states of its last layer."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a module
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:  # noqa: ANN401 - tensors
        """Return (batch, tokens, width)."""
        return self.model(input_ids=input_ids)[0]


class OfPixels(torch.nn.Module):  # type: ignore[misc]  # as above
    """A model of transformers that reads pictures."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a module
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Any) -> Any:  # noqa: ANN401 - tensors
        """Return what the last layer does."""
        return self.model(pixel_values=pixel_values)[0]


class OfText(torch.nn.Module):  # type: ignore[misc]  # as above
    """A decoder that reads a text from its begin, with a mask as tokenizers make it."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a module
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:  # noqa: ANN401 - tensors
        """Return (batch, tokens, width)."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]


class Towers(torch.nn.Module):  # type: ignore[misc]  # as above
    """The two multilayer perceptrons of DLRM, by the widths of their layers."""

    def __init__(self, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        self.bottom, self.top = self._tower(bottom), self._tower(top)
        self.top[-1] = torch.nn.Sigmoid()

    def _tower(self, widths: list[int]) -> Any:  # noqa: ANN401 - a module
        layers: list[Any] = []
        for k, n in pairwise(widths):
            layers += [torch.nn.Linear(k, n), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers)

    def forward(self, dense: Any, features: Any) -> Any:  # noqa: ANN401 - tensors
        """Return what both towers do."""
        return self.bottom(dense), self.top(features)


class MixerBlock(torch.nn.Module):  # type: ignore[misc]  # as above
    """A block of MLP-Mixer: a perceptron over tokens, then one over channels."""

    def __init__(self, tokens: int, channels: int, widths: tuple[int, int]) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(channels) for _ in range(2))
        self.of_tokens = self._perceptron(tokens, widths[0])
        self.of_channels = self._perceptron(channels, widths[1])

    def _perceptron(self, k: int, n: int) -> Any:  # noqa: ANN401 - a module
        return torch.nn.Sequential(torch.nn.Linear(k, n), torch.nn.GELU(), torch.nn.Linear(n, k))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        """Return (batch, tokens, channels)."""
        x = x + self.of_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.of_channels(self.norms[1](x))
