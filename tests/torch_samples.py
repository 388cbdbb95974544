"""Models and tensors of PyTorch for tests, and what is asked of both."""

from typing import Any

import torch

K, HIDDEN, N = 24, 40, 17

# The operators, as the profiler names them.
LINEAR, MODULE = "gemm_tuner::linear", "gemm_tuner::linear_or_plain"


def sample_model(dtype: str = "float32", *, bias: bool = True) -> Any:  # noqa: ANN401 - a module
    """Return two linear layers with a function between them."""
    return torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN, bias=bias), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, N)
    ).to(getattr(torch, dtype))


def sample_x(*shape: int, dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    """Return what such a model reads, in six rows if nothing else is said."""
    return torch.randn(*(shape or (6, K))).to(getattr(torch, dtype))


def check(y: Any, expected: Any) -> None:  # noqa: ANN401 - tensors
    """Check what a model computed, as exactly as its type allows."""
    tolerance = 1e-4 if y.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


def operator_calls(function: Any, *inputs: Any) -> dict[str, int]:  # noqa: ANN401 - a module
    """Return how often each operator of gemm-tuner is called."""
    with torch.profiler.profile() as profile, torch.no_grad():
        function(*inputs)
    return {one.key: one.count for one in profile.key_averages() if "gemm_tuner::" in one.key}
