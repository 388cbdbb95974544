"""OpenVINO's CPU plugin, with a model that its `convert_model` made of one of PyTorch."""

import sys
from importlib import import_module
from typing import Any, cast

from gemm_tuner.models.row import Prepared, Way, Work

_SETTINGS = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}


def _prepare(work: Work) -> Prepared:
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))  # it tells nobody then
    openvino = import_module("openvino")
    inputs = dict(work.built.inputs)
    converted = openvino.convert_model(work.built.module, example_input=inputs)
    # Without, each dimension may be another one in each call, and its plans are more general.
    converted.reshape({name: list(one.shape) for name, one in inputs.items()})
    options = {
        **_SETTINGS,
        "INFERENCE_PRECISION_HINT": work.precision.name,  # it would be bf16 where the CPU has it
        "INFERENCE_NUM_THREADS": work.threads,
    }
    request = openvino.compile_model(converted, "CPU", options).create_infer_request()
    names = [one.get_any_name() for one in converted.inputs]
    given = dict(zip(names, arrays_of(names, inputs), strict=True))
    return Prepared(
        call=lambda: request.infer(given, share_inputs=True, share_outputs=True),
        outputs=lambda output: [tensor_of(one) for one in output.values()],
    )


def arrays_of(names: list[str], inputs: dict[str, Any]) -> list[Any]:
    """Return the inputs of a model as arrays without gaps, in the order of their names."""
    return [inputs[name].contiguous().numpy() for name in names]


def tensor_of(array: Any) -> Any:  # noqa: ANN401 - an array, a tensor
    """Return an output as a tensor in f32."""
    return import_module("torch").from_numpy(array.astype("float32"))


ROWS = (
    Way(
        name="openvino",
        wheel="openvino",
        prepare=_prepare,
        install='pip install "gemm-tuner[peers]"',
        settings={**_SETTINGS, "shapes": "of the inputs", "INFERENCE_PRECISION_HINT": "as --dtype"},
    ),
)
