"""PyTorch for its baselines: the package, its tensors, and how it applies steps."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.chain import Link
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import OperandTypes
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.spelling import TorchOperator
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version

WHEEL = "torch"
_INSTALL = "pip install torch"

# The modules, tensors and operators of a package that may not be there.
Torch = Any
Tensor = Any


def torch_version() -> str:
    """Return the version of the installed PyTorch.

    Raises:
        BaselineMissing: there is none.
    """
    return wheel_version(WHEEL, install=_INSTALL)


def load_torch() -> None:
    """Import the package, which takes two seconds and starts no threads."""
    import_module(WHEEL)


def import_torch(threads: int) -> Torch:
    """Return the package, which shall compute without gradients on so many threads."""
    torch = import_module(WHEEL)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


def check_floats(problem: Problem) -> None:
    """Check that x, w and y are of one floating-point type.

    Raises:
        BaselineMissing: they are not.
    """
    types = problem.types
    if types.x.is_integer or types != OperandTypes.of(types.x):
        raise BaselineMissing(f"PyTorch does not compute {types.text}; choose another baseline.")


def check_steps(workload: Workload, links: tuple[Link, ...]) -> None:
    """Check that PyTorch has an operator for each step.

    Raises:
        BaselineMissing: it has not.
    """
    for link in links:
        if link.step.kind.torch is None:
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
    """Return the operand of a step, in a shape that broadcasts to y; None if it has none."""
    if link is None or link.array is None or link.operand is None:
        return None
    tensor = tensor_of(torch, link.array)
    is_column = link.operand.shape is OperandShape.COLUMN_VECTOR
    return tensor.reshape(-1, 1) if is_column else tensor


def step_in_place(torch: Torch, link: Link, operand: Tensor | None) -> Callable[[Tensor], object]:
    """Return a function that applies a step to a tensor in place."""
    operator = _operator_of(link)
    name = f"{operator.name}_"
    apply = getattr(torch.Tensor, name, None) or getattr(torch.ops.aten, name).default
    return _with_arguments(apply, link, operand)


def followed_in_place(
    torch: Torch, product: Callable[[], object], links: Sequence[Link], y: Tensor
) -> Callable[[], object]:
    """Return a call of a product that writes to `y`, and of the steps after it."""
    if not links:
        return product
    steps = [partial(step_in_place(torch, link, operand_of(torch, link)), y) for link in links]

    def call() -> None:
        product()
        for step in steps:
            step()

    return call


def followed_on_result(
    torch: Torch, product: Callable[[], Tensor], links: Sequence[Link], y: Tensor
) -> Callable[[], Tensor]:
    """Return a call of a product that makes a new tensor, and of the steps after it.

    One result is written to `y`, where it is checked: calls have no y of their own.
    """
    steps = [step_in_place(torch, link, operand_of(torch, link)) for link in links]

    def call() -> Tensor:
        result = product()
        for step in steps:
            step(result)
        return result

    y.copy_(call())
    return call if steps else product


def step_in_new_tensor(
    torch: Torch, link: Link, operand: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a new tensor of a step's results, which a compiler can trace."""
    operator = _operator_of(link)
    return _with_arguments(getattr(torch.ops.aten, operator.name), link, operand)


def _operator_of(link: Link) -> TorchOperator:
    operator = link.step.kind.torch
    if operator is None:
        raise BaselineMissing(f"PyTorch has no operator for the step {link.step.text!r}.")
    return operator


def _with_arguments(
    apply: Callable[..., Tensor], link: Link, operand: Tensor | None
) -> Callable[[Tensor], Tensor]:
    arguments = (*(() if operand is None else (operand,)), *link.step.parameters)
    attributes = dict(_operator_of(link).attributes)
    return lambda value: apply(value, *arguments, **attributes)
