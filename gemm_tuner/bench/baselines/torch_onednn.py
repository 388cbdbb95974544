"""The oneDNN inside PyTorch, with weights packed once: what a frozen, compiled layer calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.chain import split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    Torch,
    check_floats,
    check_steps,
    followed_on_result,
    import_torch,
    operand_of,
    tensor_of,
    torch_version,
    weight_of,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing

_IS_THERE = {
    DType.BF16: "_is_mkldnn_bf16_supported",
    DType.F16: "_is_mkldnn_fp16_supported",
}
_PACK, _LINEAR = "_reorder_linear_weight", "_linear_pointwise"
_PLAIN = ("none", "")


class TorchOneDnn(AnyBaseline):
    """The operator that Inductor calls for a layer with frozen weights; it makes a new result."""

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1 << 16
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch-onednn {torch_version()}"

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that there is no operator for.

        Raises:
            BaselineMissing: they are bytes, which `torch` packs too, or differ.
        """
        check_floats(problem)

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: there is no operator for a step, or oneDNN lacks the type here.
        """
        check_steps(workload, split_chain(workload).others)
        torch = import_torch(workload.threads)
        asked = _IS_THERE.get(workload.problem.types.x)
        if asked is not None and not getattr(torch.ops.mkldnn, asked)():
            raise BaselineMissing(
                f"the oneDNN in PyTorch does not compute {workload.problem.types.text} on this "
                "CPU; choose another baseline."
            )
        return PythonRunner(workload, partial(_make_call, torch, workload))


def _make_call(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    pack, linear = getattr(torch.ops.mkldnn, _PACK), getattr(torch.ops.mkldnn, _LINEAR)
    packed = pack(weight_of(torch, workload, w).contiguous(), workload.rows)
    chain = split_chain(workload)
    bias = operand_of(torch, chain.bias)
    others = list(chain.others)
    fused = others[0].step.kind.torch if others else None
    if fused is not None and others[0].is_matrix:
        matrix = operand_of(torch, others.pop(0))
        product = partial(linear.binary, x, matrix, packed, bias, fused.name)
    else:
        post_op = fused.post_op if fused else None
        scalars = list(others.pop(0).step.parameters) if post_op else []
        name, algorithm = post_op or _PLAIN
        product = partial(linear.default, x, packed, bias, name, scalars, algorithm)
    return followed_on_result(torch, product, others, y)


def _find(_materials: object) -> list[Copy]:
    library = TorchOneDnn()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="torch-onednn", place=9, find=_find),)
