"""Models and tensors of PyTorch for tests, and what is asked of both."""

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

K, HIDDEN, N = 24, 40, 17
HEADS = 3

# The operators, as the profiler names them.
LINEAR, MODULE = "gemm_tuner::linear", "gemm_tuner::linear_or_plain"
MATMUL, ATTENTION = "gemm_tuner::matmul", "gemm_tuner::attention"


def sample_model(dtype: str = "float32", *, bias: bool = True) -> Any:  # noqa: ANN401 - a module
    """Return two linear layers with a function between them."""
    return torch.nn.Sequential(
        torch.nn.Linear(K, HIDDEN, bias=bias), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, N)
    ).to(getattr(torch, dtype))


def sample_x(*shape: int, dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    """Return what such a model reads, in six rows if nothing else is said."""
    return torch.randn(*(shape or (6, K))).to(getattr(torch, dtype))


def heads_of(rows: int, heads: int = HEADS, columns: int = K) -> Any:  # noqa: ANN401 - a tensor
    """Return (2, heads, rows, columns) as attention has it: the heads of a row side by side."""
    return sample_x(2, rows, heads, columns).transpose(1, 2)


def check(y: Any, expected: Any, *, equal_nan: bool = False) -> None:  # noqa: ANN401 - tensors
    """Check what a model computed, as exactly as its type allows."""
    tolerance = 2e-2 if isinstance(y, torch.Tensor) and y.dtype != torch.float32 else 1e-4
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


def operator_calls(function: Any, *inputs: Any) -> dict[str, int]:  # noqa: ANN401 - a module
    """Return how often each operator of gemm-tuner is called."""
    with torch.profiler.profile() as profile, torch.no_grad():
        function(*inputs)
    return {one.key: one.count for one in profile.key_averages() if "gemm_tuner::" in one.key}


def passed(
    enabled: Any,  # noqa: ANN401 - a pass
    model: Any,  # noqa: ANN401 - a module
    *inputs: Any,  # noqa: ANN401 - tensors
    tracing_mode: str = "fake",
    decompositions: Any = None,  # noqa: ANN401 - of operators
) -> Any:  # noqa: ANN401 - a module
    """Return a model as a graph that a pass has changed, to be called: nothing is compiled."""
    with torch.no_grad():
        graph = make_fx(
            model,
            decomposition_table=decompositions,
            tracing_mode=tracing_mode,
            _allow_non_fake_inputs=True,
        )(*inputs)
        with torch._inductor.config.patch(freezing=True):
            enabled(graph.graph)
    graph.recompile()
    return graph
