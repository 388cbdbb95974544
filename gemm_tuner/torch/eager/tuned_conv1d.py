"""GPT-2's linear layer, transformers' `Conv1D`, that calls a tuned kernel, in eager mode."""

from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any

from gemm_tuner.torch.eager.tuned_linear import TunedModule
from gemm_tuner.torch.linear_modules import CONV1D

_MAKING = Lock()  # one class alone is the one that pickles name


def conv1d_classes() -> tuple[Any, Any]:
    """Return the class of transformers, and that of one that calls a tuned kernel.

    Raises:
        ImportError: transformers is not installed.
    """
    with _MAKING:
        return _classes()


@cache
def _classes() -> tuple[Any, Any]:
    place, name = CONV1D
    conv1d = getattr(import_module(place), name)

    class TunedConv1D(TunedModule, conv1d):  # type: ignore[misc, valid-type]  # of transformers
        """A `Conv1D` that calls a tuned kernel where it can, and is an ordinary one elsewhere."""

        plain_class = conv1d
        is_transposed = True

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            """Return `x @ weight + bias`; x is (..., k), the result is (..., n)."""
            return super().forward(x)

    TunedConv1D.__qualname__ = TunedConv1D.__name__  # where pickles look for it
    return conv1d, TunedConv1D


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    """Return the class that pickles name, which needs transformers."""
    if name == "TunedConv1D":
        return conv1d_classes()[1]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
