"""PyTorch as its users call it: one operator after the other, results written in place."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.python_callee import PythonCallee
from gemm_tuner.bench.baselines.wheels import wheel_version
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import WeightLayout
from gemm_tuner.errors import BaselineMissing

WHEEL = "torch"
_INSTALL = "pip install torch"

# The modules, tensors and operators of a package that may not be there.
Torch = Any
Tensor = Any

_TYPES = {DType.F32, DType.BF16}

# How each step changes y: by the operator that writes its result over its input.
# fmt: off
_STEPS: dict[str, Callable[..., object]] = {
    "bias":       lambda torch, y, operand: torch.add(y, operand, out=y),
    "add":        lambda torch, y, operand: torch.add(y, operand, out=y),
    "scale":      lambda torch, y, operand: torch.mul(y, operand, out=y),
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


class TorchEager:
    """PyTorch in eager mode. It is imported when it is needed, because that takes a second."""

    fuses_epilogue = True
    most_weight_copies: int | None = None
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch {torch_version()}"

    def prepare(self, workload: Workload) -> PythonCallee:
        """Return a callee that works on `workload`.

        Raises:
            BaselineMissing: the types differ, or PyTorch has no operator for a step.
        """
        check_problem(workload, _STEPS, "PyTorch")
        torch = import_torch(workload.threads)
        return PythonCallee(workload, partial(_make_call, torch, workload))


def torch_version() -> str:
    """Return the version of the installed PyTorch.

    Raises:
        BaselineMissing: there is none.
    """
    return wheel_version(WHEEL, install=_INSTALL)


def import_torch(threads: int) -> Torch:
    """Return the package, which shall compute without gradients on so many threads."""
    torch = import_module(WHEEL)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


def check_problem(workload: Workload, steps: dict[str, Any], library: str) -> None:
    """Check that a problem has one type that the library multiplies, and known steps.

    Raises:
        BaselineMissing: it has not.
    """
    problem = workload.problem
    if problem.types.x not in _TYPES or problem.types != OperandTypes.of(problem.types.x):
        raise BaselineMissing(
            f"{library} does not compute {problem.types.text}; choose another baseline."
        )
    for step in problem.epilogue.steps:
        if step.kind.name not in steps:
            raise BaselineMissing(
                f"{library} has no operator for the step {step.text!r} of {problem.text}; "
                "choose another baseline."
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


def _make_call(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    weight = weight_of(torch, workload, w).t()
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    operands = iter([tensor_of(torch, array) for array in workload.operands.values()])
    steps = list(workload.problem.epilogue.steps)
    if steps and steps[0].kind.name == "bias":
        steps.pop(0)
        product = partial(torch.addmm, next(operands), x, weight, out=y)
    else:
        product = partial(torch.mm, x, weight, out=y)
    calls = [product]
    for step in steps:
        operand = next(operands) if step.kind.operand is not OperandShape.NONE else None
        calls.append(partial(_STEPS[step.kind.name], torch, y, operand, *step.parameters))
    if len(calls) == 1:
        return product

    def call() -> None:
        for one in calls:
            one()

    return call
