"""PyTorch as its users call it: one operator after the other, results written in place."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.chain import links_of, split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_bytes import make_call_on_bytes
from gemm_tuner.bench.baselines.torch_steps import (
    Torch,
    check_floats,
    check_steps,
    followed_in_place,
    import_torch,
    operand_of,
    tensor_of,
    torch_version,
    weight_of,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.spelling import Argument
from gemm_tuner.errors import BaselineMissing

_ADD = "add"  # of torch.ops.aten


class TorchEager(AnyBaseline):
    """PyTorch in eager mode. It is imported when it is needed, because that takes a second."""

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1 << 16  # each is a tensor, made in some microseconds
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch {torch_version()}"

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that there is no operator for.

        Raises:
            BaselineMissing: floating-point types differ, or both operands are activations of bytes.
        """
        if not problem.types.x.is_integer:
            check_floats(problem)
        elif not problem.operation.packs_ahead:
            raise BaselineMissing(
                f"PyTorch packs one operand of {problem.types.text} ahead; choose another baseline."
            )

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: there is no operator for a step.
        """
        check_steps(workload, split_chain(workload).others)
        make, self.implementation = _make_call, "mm or addmm, then steps in place"
        if workload.problem.types.x.is_integer:
            make, self.implementation = make_call_on_bytes, "onednn.qlinear_pointwise"
        elif not workload.problem.operation.packs_ahead:
            make = _make_call_on_activations
        return PythonRunner(workload, partial(make, import_torch(workload.threads), workload))


def _make_call(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    weight = weight_of(torch, workload, w).t()
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    chain = split_chain(workload)
    if chain.bias is None:
        product = partial(torch.mm, x, weight, out=y)
    else:
        product = partial(torch.addmm, operand_of(torch, chain.bias), x, weight, out=y)
    return followed_in_place(torch, product, chain.others, y)


def _make_call_on_activations(
    torch: Torch, workload: Workload, w: NDArray[Any]
) -> Callable[[], object]:
    """Return a call that scales the product and adds a matrix or a bias to it in one operator."""
    weight = weight_of(torch, workload, w).t()
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    links = links_of(workload)
    alpha, added, beta = 1.0, y, 0.0
    if links and links[0].argument is Argument.SCALE:
        scale = links.pop(0).array
        alpha = alpha if scale is None else float(scale[0])
    if links and (operator := links[0].step.kind.torch) and operator.name == _ADD:
        added, beta = operand_of(torch, links.pop(0)), 1.0
    product = partial(torch.addmm, added, x, weight, beta=beta, alpha=alpha, out=y)
    return followed_in_place(torch, product, links, y)


def _find(_materials: object) -> list[Copy]:
    library = TorchEager()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="torch", place=6, find=_find, takes_activations=True),)
