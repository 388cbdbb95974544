"""gemm-tuner: generate, prove, time, choose and serve CPU matrix-multiplication kernels.

The names below are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemm_tuner import errors as errors
    from gemm_tuner.arrays.quantise import quantise_weights as quantise_weights
    from gemm_tuner.client.client import Client as Client
    from gemm_tuner.domain.problem import Problem as Problem
    from gemm_tuner.layers.linear import linear as linear
    from gemm_tuner.runtime.activations import QuantisedActivations as QuantisedActivations
    from gemm_tuner.runtime.activations import quantise_activations as quantise_activations
    from gemm_tuner.runtime.activations import quantise_channels as quantise_channels
    from gemm_tuner.tuning.tune import tune as tune
    from gemm_tuner.tuning.tune import tune_layer as tune_layer

_HOMES = {
    "Client": "gemm_tuner.client.client",
    "Problem": "gemm_tuner.domain.problem",
    "linear": "gemm_tuner.layers.linear",
    "QuantisedActivations": "gemm_tuner.runtime.activations",
    "quantise_activations": "gemm_tuner.runtime.activations",
    "quantise_channels": "gemm_tuner.runtime.activations",
    "quantise_weights": "gemm_tuner.arrays.quantise",
    "tune": "gemm_tuner.tuning.tune",
    "tune_layer": "gemm_tuner.tuning.tune",
}

__all__ = [
    "Client",
    "Problem",
    "QuantisedActivations",
    "errors",
    "linear",
    "quantise_activations",
    "quantise_channels",
    "quantise_weights",
    "tune",
    "tune_layer",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("gemm_tuner.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'gemm_tuner' has no attribute {name!r}.")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # the next time, this function is not called
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
