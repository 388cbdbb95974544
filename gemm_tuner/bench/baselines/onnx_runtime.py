"""ONNX Runtime, called from Python: a model of one layer, its weights packed by the session."""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import MOST_MODELS, AnyBaseline, Copy, Package, Row
from gemm_tuner.bench.baselines.onnx_model import W, X, Y, product_text, write_model
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32, DType, OperandTypes
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import installed_wheels, wheel_version
from gemm_tuner.machine.memory import address_of

_WHEEL = "onnxruntime"
_START_S = 1.0
_INSTALL = 'pip install "gemm-tuner[peers]"'
_CPU = "CPUExecutionProvider"
_FLOATS = (F32, OperandTypes.of(DType.F16))  # f16 is converted where the CPU cannot add in it
_ERRORS_ONLY = 3
_UNSIGNED_BYTES = "tensor(uint8)"


class OnnxRuntime(AnyBaseline):
    """ONNX Runtime with all graph optimisations, its inputs and outputs bound to fixed buffers.

    Each copy of the weights is a session of its own. It is imported when it is needed, because it
    starts a thread.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = MOST_MODELS
    preparation_s = 30.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        wheel_version("onnx", install=_INSTALL)  # writes its models
        self.text = f"onnxruntime {wheel_version(_WHEEL, install=_INSTALL)}"

    def check_problem(self, problem: Problem) -> None:
        """Refuse what there is no product for.

        Raises:
            BaselineMissing: the problem is not in float32, float16 or bytes.
        """
        types = problem.types
        if types not in _FLOATS and not (types.x.is_integer and types.y is not DType.BF16):
            raise BaselineMissing(
                f"ONNX Runtime does not compute {types.text} on a CPU; choose another baseline."
            )

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`."""
        runtime = import_module(_WHEEL)
        self.implementation = product_text(workload.problem.types)
        written = cache(partial(write_model, workload, workload.w))  # all copies are the same
        return PythonRunner(workload, partial(_make_call, runtime, workload, written))


def _make_call(
    runtime: Any,  # noqa: ANN401 - the package is optional
    workload: Workload,
    written: Callable[[], bytes],
    w: NDArray[Any],
) -> Callable[[], object]:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = workload.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Threads spin while a call runs; idle ones would slow down the runner that is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = _ERRORS_ONLY
    model = written()
    try:
        session = runtime.InferenceSession(model, options, providers=[_CPU])
    except Exception as error:
        raise BaselineMissing(
            f"ONNX Runtime refuses {workload.problem.text}: {error}; choose another baseline."
        ) from error
    binding = session.io_binding()
    arrays = {X: workload.x, W: w, **workload.operands}
    for wanted in session.get_inputs():
        array = arrays[wanted.name]
        dtype = np.uint8 if wanted.type == _UNSIGNED_BYTES else array.dtype.type
        binding.bind_input(wanted.name, "cpu", 0, dtype, array.shape, address_of(array))
    y = workload.y
    binding.bind_output(Y, "cpu", 0, y.dtype.type, y.shape, address_of(y))
    return partial(session.run_with_iobinding, binding)


def _find(_materials: object) -> list[Copy]:
    library = OnnxRuntime()
    return [Copy(package=library.text, baseline=library, start_s=_START_S)]


def _packages() -> list[Package]:
    return [Package(text, _START_S) for text in installed_wheels(_WHEEL)]


ROWS = (
    Row(
        name="onnxruntime",
        place=5,
        find=_find,
        installed=_packages,
        is_raced=True,
        takes_activations=True,
    ),
)
