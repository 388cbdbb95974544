"""PyTorch's operators for quantised weights: bytes with a scale per column, 4 bits in groups."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.quantise import read_elements
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.chain import split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    Tensor,
    Torch,
    check_steps,
    import_torch,
    operand_of,
    step_in_place,
    tensor_of,
    torch_version,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing

# Operators of torch.ops.aten.
_PRODUCT_OF_BYTES = "_weight_int8pack_mm"
_PACK_4_BITS = "_convert_weight_to_int4pack_for_cpu"
_PRODUCT_OF_4_BITS = "_weight_int4pack_mm_for_cpu"
_GROUPS = (32, 64, 128, 256)
_MIDDLE = 8  # of the 16 elements; what PyTorch adds to a group is counted from it
# The operator of bytes reads past the end of other sizes (PyTorch 2.13, x of bf16: it crashes).
_COLUMNS, _STEPS_OF_K = 16, 32
_INNER_TILES = 1  # counts on GPUs only

TORCH_WEIGHTS = "torch-weights"


class TorchWeightOnly(AnyBaseline):
    """PyTorch in eager mode, with weights as they are quantised.

    `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu` compute y in the type of x, and take
    scales in it. Other operators (`_dyn_quant_matmul_4bit`) quantise x too: another function.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1 << 12  # each is packed once more
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch-weights {torch_version()}"

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: there is no operator for such weights, or for a step.
        """
        problem = workload.problem
        reason = _why_not(problem)
        if reason is not None:
            raise BaselineMissing(
                f"PyTorch has no operator for {problem.text}: {reason}; choose another baseline."
            )
        chain = split_chain(workload)
        links = (*((chain.bias,) if chain.bias else ()), *chain.others)
        check_steps(workload, links)
        torch = import_torch(workload.threads)
        steps = [step_in_place(torch, link, operand_of(torch, link)) for link in links]
        return PythonRunner(workload, partial(_make_call, torch, workload, steps))


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


def _make_call(
    torch: Torch,
    workload: Workload,
    steps: Sequence[Callable[[Tensor], object]],
    w: NDArray[Any],
) -> Callable[[], object]:
    elements = torch.from_numpy(read_elements(workload.problem, w))
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    make = _product_of_4_bits if workload.problem.types.w.size_bits == 4 else _product_of_bytes
    product = make(torch, workload, elements, x)

    def run() -> object:
        result = product()
        for step in steps:
            step(result)
        return result

    y.copy_(run())  # calls have no y of their own; this one is checked
    return run if steps else product


def _product_of_bytes(
    torch: Torch, workload: Workload, elements: Tensor, x: Tensor
) -> Callable[[], Tensor]:
    scales = torch.from_numpy(workload.scales).reshape(-1).to(x.dtype)
    product = getattr(torch.ops.aten, _PRODUCT_OF_BYTES)
    return partial(product, x, elements.to(torch.int8).contiguous(), scales)


def _product_of_4_bits(
    torch: Torch, workload: Workload, elements: Tensor, x: Tensor
) -> Callable[[], Tensor]:
    """Return the call: a weight is (element - 8) * scale + what lies beside the scale."""
    scales = workload.scales
    assert scales is not None
    if workload.zero_points is None:
        elements = elements + _MIDDLE  # from -8 on
        added = np.zeros_like(scales)
    else:
        added = (_MIDDLE - workload.zero_points.astype(np.float32)) * scales
    beside = np.stack([scales, added], axis=-1).swapaxes(0, 1)  # (groups, n, 2)
    return partial(
        getattr(torch.ops.aten, _PRODUCT_OF_4_BITS),
        x,
        getattr(torch.ops.aten, _PACK_4_BITS)(elements.to(torch.int32), _INNER_TILES),
        workload.problem.w_group,
        torch.from_numpy(np.ascontiguousarray(beside)).to(x.dtype),
    )


def _find(_materials: object) -> list[Copy]:
    library = TorchWeightOnly()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name=TORCH_WEIGHTS, place=7, find=_find, takes_quantised=True, is_usual=False),)
