"""OpenVINO's CPU plugin, called from Python: a model of one layer, compiled once."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import MOST_MODELS, AnyBaseline, Copy, Row
from gemm_tuner.bench.baselines.onnx_model import W, X, product_text, write_model
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version

WHEEL = "openvino"
_INSTALL = 'pip install "gemm-tuner[peers]"'
_PLUGIN = "CPU"

Array = NDArray[Any]
# A model of a package that may not be there: its own, or in the format of ONNX.
Model = Any


def openvino_text() -> str:
    """Return the name and version of the installed OpenVINO.

    Raises:
        BaselineMissing: there is none.
    """
    return f"openvino {wheel_version(WHEEL, install=_INSTALL)}"


class CpuPlugin:
    """Compiles models for one stream, in their own precision."""

    def __init__(self) -> None:
        """Import the package, which starts threads."""
        self._package: Any = import_module(WHEEL)
        self._core = self._package.Core()
        self._bound: list[Array] = []  # which tensors do not keep alive

    def compiled(
        self, model: Model, arrays: Mapping[str, Array], y: Array, *, threads: int, text: str
    ) -> Callable[[], object]:
        """Return a call of a model whose inputs, by name, and output are bound to arrays.

        They live as long as this plugin. `text` names the problem.

        Raises:
            BaselineMissing: OpenVINO refuses the model.
        """
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # it would be bf16 where the CPU has it
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        try:
            read = self._core.read_model(model) if isinstance(model, bytes) else model
            compiled = self._core.compile_model(read, _PLUGIN, settings)
        except RuntimeError as error:
            raise BaselineMissing(
                f"OpenVINO refuses {text}: {error}; choose another baseline."
            ) from error
        request = compiled.create_infer_request()
        for wanted in compiled.inputs:
            array = arrays[wanted.get_any_name()]
            request.set_tensor(wanted, self._tensor(array))
        request.set_tensor(compiled.outputs[0], self._tensor(y))
        call: Callable[[], object] = partial(request.infer, share_outputs=True)
        return call

    def _tensor(self, array: Array) -> object:
        self._bound.append(array)
        return self._package.Tensor(array, shared_memory=True)


class OpenVino(AnyBaseline):
    """OpenVINO with the precision of the model and one stream, its arrays bound to its tensors.

    Each copy of the weights is a model of its own. It is imported when it is needed, because it
    starts threads.
    """

    fuses_epilogue = True
    is_of_openmp = False  # its own threads are set when it starts
    most_weight_copies = MOST_MODELS
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it, or `onnx`, is not installed.
        """
        wheel_version("onnx", install=_INSTALL)  # writes its models
        self.text = openvino_text()

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
        self.implementation = product_text(workload.problem.types)
        return PythonRunner(workload, partial(_make_call, CpuPlugin(), workload))


def _make_call(plugin: CpuPlugin, workload: Workload, w: Array) -> Callable[[], object]:
    return plugin.compiled(
        write_model(workload, w),
        {X: workload.x, W: w, **workload.operands},
        workload.y,
        threads=workload.threads,
        text=workload.problem.text,
    )


def _find(_materials: object) -> list[Copy]:
    library = OpenVino()
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="openvino", place=11, find=_find, takes_activations=True),)
