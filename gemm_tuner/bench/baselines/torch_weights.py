"""PyTorch's operators for quantised weights: bytes with a scale per column, 4 bits in groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from gemm_tuner.arrays.quantise import read_elements
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Package, Row
from gemm_tuner.bench.baselines.chain import split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    WHEEL,
    Tensor,
    Torch,
    check_steps,
    import_torch,
    load_torch,
    operand_of,
    step_in_place,
    tensor_of,
    torch_version,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import installed_wheels

# Operators of torch.ops.aten.
_PRODUCT_OF_BYTES = "_weight_int8pack_mm"
_PACK_4_BITS = "_convert_weight_to_int4pack_for_cpu"
_PRODUCT_OF_4_BITS = "_weight_int4pack_mm_for_cpu"
_GROUPS = (32, 64, 128, 256)
_MIDDLE = 8  # of the 16 elements; what PyTorch adds to a group is counted from it
# The operator of bytes reads past the end of other sizes (PyTorch 2.13, x of bf16: it crashes).
_COLUMNS, _STEPS_OF_K = 16, 32
_INNER_TILES = 1  # counts on GPUs only

# Of an operator, besides x; the first are the packed weights.
Arguments = tuple[Any, ...]

TORCH_WEIGHTS = "torch-weights"
_START_S = 2.0


class TorchWeightOnly(AnyBaseline):
    """PyTorch in eager mode, with weights as they are quantised.

    `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu` compute y in the type of x, and take
    scales in it. Other operators (`_dyn_quant_matmul_4bit`) quantise x too: another function.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1 << 12  # each is a tensor of its own
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"{TORCH_WEIGHTS} {torch_version()}"

    def preload(self) -> None:
        """Import PyTorch here: that takes two seconds and starts no threads."""
        load_torch()

    def check_problem(self, problem: Problem) -> None:
        """Refuse what the operators do not compute.

        Raises:
            BaselineMissing: there is no operator for such weights.
        """
        reason = _why_not(problem)
        if reason is not None:
            raise BaselineMissing(
                f"PyTorch has no operator for {problem.text}: {reason}; choose another baseline."
            )

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: there is no operator for a step.
        """
        chain = split_chain(workload)
        links = (*((chain.bias,) if chain.bias else ()), *chain.others)
        check_steps(workload, links)
        torch = import_torch(workload.threads)
        steps = [step_in_place(torch, link, operand_of(torch, link)) for link in links]
        self.implementation = _operator_of(workload.problem)
        product = _Product(torch=torch, workload=workload)
        return PythonRunner(workload, lambda _w: _make_call(product, steps))


def _why_not(problem: Problem) -> str | None:
    """Return in words what the operators cannot do, None if there is nothing."""
    types = problem.types
    if not types.is_weight_only:
        return "its weights are not quantised"
    if types.y is not types.x:
        return "y has another type than x"
    if types.w.size_bits == 4:
        if problem.w_group not in _GROUPS or problem.k % problem.w_group:
            return f"groups of 4-bit weights are whole ones of {_GROUPS}"
    elif types.w is DType.U8 or problem.w_group != problem.k:
        return "weights of 8 bits are signed, with one scale per column"
    elif problem.k % _STEPS_OF_K:
        return f"k is a multiple of {_STEPS_OF_K}"
    return f"n is a multiple of {_COLUMNS}" if problem.n % _COLUMNS else None


def _operator_of(problem: Problem) -> str:
    return _PRODUCT_OF_4_BITS if problem.types.w.size_bits == 4 else _PRODUCT_OF_BYTES


@dataclass(frozen=True, kw_only=True)
class _Product:
    """The product of a workload. Its weights are packed once: that takes far longer than a call."""

    torch: Torch
    workload: Workload

    @cached_property
    def packed(self) -> Arguments:
        problem = self.workload.problem
        elements = self.torch.from_numpy(read_elements(problem, self.workload.w))
        pack = _pack_4_bits if problem.types.w.size_bits == 4 else _pack_bytes
        return pack(self.torch, self.workload, elements)

    def call(self) -> Callable[[], Tensor]:
        """Return a call of the operator with a copy of the packed weights of its own."""
        weights, *others = self.packed
        operator = getattr(self.torch.ops.aten, _operator_of(self.workload.problem))
        x = tensor_of(self.torch, self.workload.x)
        return partial(operator, x, weights.clone(), *others)


def _make_call(
    product: _Product, steps: Sequence[Callable[[Tensor], object]]
) -> Callable[[], object]:
    multiply = product.call()

    def run() -> object:
        result = multiply()
        for step in steps:
            step(result)
        return result

    y = tensor_of(product.torch, product.workload.y)
    y.copy_(run())  # calls have no y of their own; this one is checked
    return run if steps else multiply


def _pack_bytes(torch: Torch, workload: Workload, elements: Tensor) -> Arguments:
    assert workload.scales is not None
    scales = tensor_of(torch, workload.scales).reshape(-1)
    return elements.to(torch.int8).contiguous(), _like_x(torch, workload, scales)


def _pack_4_bits(torch: Torch, workload: Workload, elements: Tensor) -> Arguments:
    """Return the arguments: a weight is (element - 8) * scale + what lies beside the scale."""
    scales = workload.scales
    assert scales is not None
    if workload.zero_points is None:
        elements = elements + _MIDDLE  # from -8 on
        added = np.zeros_like(scales)
    else:
        added = (_MIDDLE - workload.zero_points.astype(np.float32)) * scales
    beside = np.stack([scales, added], axis=-1).swapaxes(0, 1)  # (groups, n, 2)
    return (
        getattr(torch.ops.aten, _PACK_4_BITS)(elements.to(torch.int32), _INNER_TILES),
        workload.problem.w_group,
        _like_x(torch, workload, torch.from_numpy(np.ascontiguousarray(beside))),
    )


def _like_x(torch: Torch, workload: Workload, tensor: Tensor) -> Tensor:
    """Return a tensor in the type of x."""
    return tensor.to(tensor_of(torch, workload.x).dtype)


def _find(_materials: object) -> list[Copy]:
    library = TorchWeightOnly()
    return [
        Copy(package=package, baseline=library, start_s=start_s) for package, start_s in _packages()
    ]


def _packages() -> list[Package]:
    return [Package(text, _START_S) for text in installed_wheels(WHEEL)]


ROWS = (
    Row(
        name=TORCH_WEIGHTS,
        place=7,
        find=_find,
        installed=_packages,
        is_raced=True,
        takes_quantised=True,
        is_usual=False,
    ),
)
