"""A small network in NumPy whose layers find their kernels by themselves.

    python examples/numpy_linear.py [never|background|wait]

The first argument says whether what is missing in your own database is tuned: with `background`
a library computes meanwhile. It computes batches of two sizes in float32 and with weights and
activations of 8 bits, prints how far these are from each other, and what computes each layer.
"""

import sys
from typing import Literal, cast

import numpy as np

import gemm_tuner

SIZES = ((256, 64), (64, 256))  # (n, k) of each layer, as PyTorch stores weights
BUDGET_S = 2.0


def main(tune: Literal["never", "background", "wait"]) -> None:
    """Compute, and print what came out."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal(size, np.float32) * np.float32(0.1) for size in SIZES]
    biases = [np.zeros(n, np.float32) for n, _k in SIZES]
    activations = ["gelu_erf", None]

    layers = {
        dtype: [
            gemm_tuner.linear(w, bias, function, dtype=dtype, tune=tune, budget_s=BUDGET_S)
            for w, bias, function in zip(weights, biases, activations, strict=True)
        ]
        for dtype in (None, "int8")
    }
    for rows in (1, 32):
        x = random.standard_normal((rows, 64), np.float32)
        results = {}
        for dtype, network in layers.items():
            y = x
            for layer in network:
                y = layer(y)
            results[dtype] = y
        error = np.abs(results["int8"] - results[None]).max() / np.abs(results[None]).max()
        print(f"{rows} rows: int8 is off by {error:.1%} of the greatest result")
    for network in layers.values():
        for layer in network:
            print(layer.explain())


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else "background"
    main(cast(Literal["never", "background", "wait"], given))
