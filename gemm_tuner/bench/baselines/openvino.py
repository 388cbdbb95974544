"""OpenVINO's CPU plugin, called from Python: a model of one layer, compiled once."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.onnx_model import X, write_model
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version

_WHEEL = "openvino"
_INSTALL = 'pip install "gemm-tuner[peers]"'
_PLUGIN = "CPU"


class OpenVino(AnyBaseline):
    """OpenVINO with the precision of the model and one stream, its arrays bound to its tensors.

    Each copy of the weights is a model of its own. It is imported when it is needed, because it
    starts threads.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = 256
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it, or `onnx`, is not installed.
        """
        wheel_version("onnx", install=_INSTALL)  # writes its models
        self.text = f"openvino {wheel_version(_WHEEL, install=_INSTALL)}"

    def check_problem(self, problem: Problem) -> None:
        """Refuse other types than float32.

        Raises:
            BaselineMissing: the problem has other types.
        """
        if problem.types != F32:
            raise BaselineMissing(
                f"OpenVINO is called in float32 only, not in {problem.types.text}; "
                "choose another baseline."
            )

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`."""
        package = import_module(_WHEEL)
        return PythonRunner(workload, partial(_make_call, package, package.Core(), workload))


def _make_call(
    package: Any,  # noqa: ANN401 - the package is optional
    core: Any,  # noqa: ANN401 - as above
    workload: Workload,
    w: NDArray[Any],
) -> Callable[[], object]:
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",  # it would be bf16 where the CPU has it
        "INFERENCE_NUM_THREADS": workload.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    try:
        model = core.compile_model(core.read_model(write_model(workload, w)), _PLUGIN, settings)
    except RuntimeError as error:
        raise BaselineMissing(
            f"OpenVINO refuses {workload.problem.text}: {error}; choose another baseline."
        ) from error
    request = model.create_infer_request()
    arrays = {X: workload.x, **workload.operands}
    for wanted in model.inputs:
        name = wanted.get_any_name()
        request.set_tensor(wanted, package.Tensor(arrays[name], shared_memory=True))
    request.set_tensor(model.outputs[0], package.Tensor(workload.y, shared_memory=True))
    return partial(request.infer, share_outputs=True)


def _find(_materials: object) -> list[Copy]:
    library = OpenVino()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="openvino", place=11, find=_find),)
