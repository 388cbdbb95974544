"""PyTorch's compiler at its best: max-autotune with its C++ template, weights frozen and packed."""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.chain import split_chain
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    Tensor,
    Torch,
    check_floats,
    check_steps,
    import_torch,
    operand_of,
    step_in_new_tensor,
    tensor_of,
    torch_version,
    weight_of,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.errors import BaselineMissing

# With gcc 12 the kernels of the template reach a third of the speed that they have with clang 19
# (AMD EPYC, family 26).
_COMPILERS = ("clang++-19", "clang++-20", "clang++-18", "clang++", "g++")
_OPENMP_SOURCE = "#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"


class TorchInductor(AnyBaseline):
    """A layer compiled by Inductor, called from Python.

    Its weights are constants in what it compiled, so it is not timed with cold weights.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 1
    preparation_s = 600.0
    starts_programs = True  # the compiler

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch-inductor {torch_version()}"

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the types differ, or PyTorch has no operator for a step.
        """
        check_floats(workload.problem)
        check_steps(workload, split_chain(workload).others)
        if "CXX" not in os.environ:
            os.environ["CXX"] = _find_compiler()
        torch = import_torch(workload.threads)
        return PythonRunner(workload, partial(_make_call, torch, workload))


def _find_compiler() -> str:
    """Return the best compiler that has OpenMP, which Inductor needs.

    Raises:
        BaselineMissing: there is none.
    """
    for compiler in filter(None, map(shutil.which, _COMPILERS)):
        build = [compiler, "-x", "c++", "-fopenmp", "-shared", "-fPIC", "-o", os.devnull, "-"]
        if (
            subprocess.run(
                build, input=_OPENMP_SOURCE, text=True, capture_output=True, check=False
            ).returncode
            == 0
        ):
            return compiler
    raise BaselineMissing(
        "Inductor needs a C++ compiler with OpenMP; install clang 19 with libomp, or g++."
    )


def _make_call(torch: Torch, workload: Workload, w: NDArray[Any]) -> Callable[[], object]:
    # It would print tables, and start processes that outlive this one.
    import_module("torch._inductor.select_algorithm").PRINT_AUTOTUNE = False  # type: ignore[attr-defined] # of an optional package
    config: Any = import_module("torch._inductor.config")
    config.compile_threads = 1
    config.freezing = True
    config.max_autotune_gemm_backends = "CPP,ATEN"
    config.cpp.threads = workload.threads
    layer = _make_layer(torch, workload, weight_of(torch, workload, w)).eval()
    compiled = torch.compile(layer, mode="max-autotune", dynamic=False)
    x, y = tensor_of(torch, workload.x), tensor_of(torch, workload.y)
    matrices = [operand_of(torch, link) for link in split_chain(workload).others if link.is_matrix]
    try:
        y.copy_(compiled(x, *matrices))  # calls have no y of their own; this one is checked
    except Exception as error:
        raise BaselineMissing(
            f"Inductor refuses {workload.problem.text}: {error}; choose another baseline."
        ) from error
    return partial(compiled, x, *matrices)


def _make_layer(torch: Torch, workload: Workload, weight: Tensor) -> Any:  # noqa: ANN401 - a module of an optional package
    """Return the layer as a module; its inputs are x and the matrices among the operands."""
    problem = workload.problem
    chain = split_chain(workload)

    class Layer(torch.nn.Module):  # type: ignore[misc] # its base is of an optional package
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(problem.k, problem.n, bias=chain.bias is not None)
            self.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            if chain.bias is not None:
                bias = operand_of(torch, chain.bias)
                self.linear.bias = torch.nn.Parameter(bias, requires_grad=False)
            for number, link in enumerate(chain.others):
                if not link.is_matrix:
                    self.register_buffer(f"operand_{number}", operand_of(torch, link))

        def forward(self, x: Tensor, *matrices: Tensor) -> Tensor:
            value = self.linear(x)
            given = iter(matrices)
            for number, link in enumerate(chain.others):
                operand = next(given) if link.is_matrix else getattr(self, f"operand_{number}")
                value = step_in_new_tensor(torch, link, operand)(value)
            return value

    return Layer()


def _find(_materials: object) -> list[Copy]:
    library = TorchInductor()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="torch-inductor", place=8, find=_find, is_usual=False),)
