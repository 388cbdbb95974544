"""AMD's libraries for PyTorch: the package zentorch, with AOCL-DLP in it, weights packed once."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.chain import Link, links_of, split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
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
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version

WHEEL = "zentorch"
_INSTALL = 'pip install "gemm-tuner[torch,zentorch]"'
_NO_STEP = "none"


class Zentorch(AnyBaseline):
    """The linear layer of zentorch, which writes in place and fuses a function and a matrix.

    It is of one version of PyTorch each.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1 << 16
    preparation_s = 120.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it, or PyTorch, is not installed.
        """
        self.text = zentorch_text()

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that there is no operator for.

        Raises:
            BaselineMissing: they are bytes, or differ.
        """
        check_floats(problem)

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: there is no operator for a step, or the package refuses the problem.
        """
        check_steps(workload, split_chain(workload).others)
        torch = import_zentorch(workload.threads)
        is_layer = workload.problem.operation.packs_ahead
        self.implementation = "zentorch_linear" if is_layer else "zentorch_bmm"
        make = _make_call if is_layer else _make_call_on_activations
        return PythonRunner(workload, partial(make, torch, workload))


def zentorch_text() -> str:
    """Return the name and version of the installed package.

    Raises:
        BaselineMissing: it, or PyTorch, is not installed.
    """
    torch_version()
    return f"zentorch {wheel_version(WHEEL, install=_INSTALL)}"


def import_zentorch(threads: int) -> Torch:
    """Return PyTorch with the operators of zentorch, without gradients, on so many threads.

    Raises:
        BaselineMissing: the two do not fit.
    """
    torch = import_torch(threads)
    try:
        import_module(WHEEL)
    except ImportError as error:
        raise BaselineMissing(
            f"zentorch cannot be loaded beside torch {torch.__version__}: {error}; "
            "install the version that is for it."
        ) from error
    return torch


def checked_call(call: Callable[[], object], workload: Workload) -> Callable[[], object]:
    """Return a call that was made once.

    Raises:
        BaselineMissing: zentorch refuses it.
    """
    try:
        call()
    except RuntimeError as error:
        raise BaselineMissing(
            f"zentorch refuses {workload.problem.text}: {error}; choose another baseline."
        ) from error
    return call


def _make_call_on_activations(
    torch: Torch, workload: Workload, w: NDArray[Any]
) -> Callable[[], object]:
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    product = partial(
        torch.ops.zentorch.zentorch_bmm.out,
        x[None],
        weight_of(torch, workload, w).t()[None],
        out=y[None],
    )
    links = links_of(workload)
    return followed_in_place(torch, checked_call(product, workload), links, y)


def _make_call(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    operators = torch.ops.zentorch
    chain = split_chain(workload)
    others = list(chain.others)
    fused = _NO_STEP
    if others and (name := _fused_name(others[0])):
        fused, _step = name, others.pop(0)
    arguments: dict[str, object] = {"is_weight_prepacked": True, "out": y}
    weight = operators.zentorch_weight_prepack_for_linear(weight_of(torch, workload, w))
    bias = operand_of(torch, chain.bias)
    if others and others[0].is_matrix and (operator := others[0].step.kind.torch):
        matrix = operand_of(torch, others.pop(0))
        linear = operators.zentorch_linear_unary_binary.out
        arguments |= {"post_op_1": fused, "post_op_2": operator.name}
        product = partial(linear, x, weight, matrix, bias, **arguments)
    else:
        linear = operators.zentorch_linear_unary.out
        product = partial(linear, x, weight, bias, post_op=fused, **arguments)
    return followed_in_place(torch, checked_call(product, workload), others, y)


def _fused_name(link: Link) -> str | None:
    operator = link.step.kind.torch
    return operator.zentorch if operator else None


def _find(_materials: object) -> list[Copy]:
    library = Zentorch()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="zentorch", place=10, find=_find, takes_activations=True),)
