"""PyTorch for its baselines: the package, its tensors, and its operators for steps."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.chain import Link
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version

_WHEEL = "torch"
_INSTALL = "pip install torch"

# The modules, tensors and operators of a package that may not be there.
Torch = Any
Tensor = Any

# How each step changes y: by the operator that writes its result over its input.
# fmt: off
STEPS: dict[str, Callable[..., object]] = {
    "bias":       lambda torch, y, operand: torch.add(y, operand, out=y),
    "add":        lambda torch, y, operand: torch.add(y, operand, out=y),
    "scale":      lambda torch, y, operand: torch.mul(y, operand, out=y),
    "channel_scale": lambda torch, y, operand: torch.mul(y, operand, out=y),
    "row_scale":  lambda torch, y, operand: torch.mul(y, operand, out=y),
    "mul":        lambda torch, y, operand: torch.mul(y, operand, out=y),
    "relu":       lambda torch, y, _operand: torch.relu_(y),
    "leaky_relu": lambda torch, y, _operand, slope:
        torch.ops.aten.leaky_relu.out(y, slope, out=y),
    "clamp":      lambda torch, y, _operand, low, high: torch.clamp(y, low, high, out=y),
    "hardswish":  lambda torch, y, _operand: torch.ops.aten.hardswish.out(y, out=y),
    "sigmoid":    lambda torch, y, _operand: torch.sigmoid(y, out=y),
    "silu":       lambda torch, y, _operand: torch.ops.aten.silu.out(y, out=y),
    "tanh":       lambda torch, y, _operand: torch.tanh(y, out=y),
    "gelu_tanh":  lambda torch, y, _operand: torch.ops.aten.gelu.out(
        y, approximate="tanh", out=y),
    "gelu_erf":   lambda torch, y, _operand: torch.ops.aten.gelu.out(y, out=y),
}
# fmt: on


def torch_version() -> str:
    """Return the version of the installed PyTorch.

    Raises:
        BaselineMissing: there is none.
    """
    return wheel_version(_WHEEL, install=_INSTALL)


def import_torch(threads: int) -> Torch:
    """Return the package, which shall compute without gradients on so many threads."""
    torch = import_module(_WHEEL)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


def check_steps(workload: Workload, links: tuple[Link, ...], steps: dict[str, Any]) -> None:
    """Check that PyTorch has an operator for each step.

    Raises:
        BaselineMissing: it has not.
    """
    for link in links:
        if link.name not in steps:
            raise BaselineMissing(
                f"PyTorch has no operator for the step {link.step.text!r} of "
                f"{workload.problem.text}; choose another baseline."
            )


def tensor_of(torch: Torch, array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array."""
    if array.dtype.name == "bfloat16":  # which PyTorch does not know as a type of NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def weight_of(torch: Torch, workload: Workload, w: NDArray[Any]) -> Tensor:
    """Return the weights as a tensor of n rows and k columns."""
    tensor = tensor_of(torch, w)
    return tensor if workload.problem.w_layout is WeightLayout.NK else tensor.t()


def operand_of(torch: Torch, link: Link | None) -> Tensor | None:
    """Return what a step reads, in a shape that broadcasts to y; None if it reads nothing."""
    if link is None or link.array is None or link.operand is None:
        return None
    tensor = tensor_of(torch, link.array)
    is_column = link.operand.shape is OperandShape.COLUMN_VECTOR
    return tensor.reshape(-1, 1) if is_column else tensor


def apply_step(torch: Torch, link: Link, operand: Tensor | None, y: Tensor) -> None:
    """Apply a step to y, in its place."""
    STEPS[link.name](torch, y, operand, *link.step.parameters)
