"""OpenVINO's CPU plugin, with a model that its `convert_model` made of one of PyTorch."""

import sys
from importlib import import_module
from typing import Any, cast

from gemm_tuner.arrays.quantise import quantise_weights, read_elements
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.problem import Problem
from gemm_tuner.models.quantising import group_of
from gemm_tuner.models.row import Prepared, Way, Work

_SETTINGS = {
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": "1",
    # Where weights alone are bytes, x stays what it is: it would be rounded at each call.
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
_LARGEST = 127


def _prepare(work: Work) -> Prepared:
    sys.modules.setdefault("openvino_telemetry", cast(Any, None))  # it tells nobody then
    openvino = import_module("openvino")
    plain = work.plain()
    inputs = dict(plain.inputs)
    if work.precision.program:
        converted = openvino.convert_model(work.precision.program(plain))
    else:
        converted = openvino.convert_model(plain.module, example_input=inputs)
    # Without, each dimension may be another one in each call, and its plans are more general.
    converted.reshape({name: list(one.shape) for name, one in inputs.items()})
    types = OperandTypes.parse(work.precision.types)
    if types.is_weight_only:
        _compress_weights(converted, types.w)
    options = {
        **_SETTINGS,
        "INFERENCE_PRECISION_HINT": work.precision.other,  # it would be bf16 where the CPU has it
        "INFERENCE_NUM_THREADS": work.threads,
    }
    request = openvino.compile_model(converted, "CPU", options).create_infer_request()
    names = [one.get_any_name() for one in converted.inputs]
    given = dict(zip(names, arrays_of(names, inputs), strict=True))
    return Prepared(
        call=lambda: request.infer(given, share_inputs=True, share_outputs=True),
        outputs=lambda output: [tensor_of(one) for one in output.values()],
    )


def _compress_weights(model: Any, w_type: DType) -> None:  # noqa: ANN401 - of OpenVINO
    """Give the products of a model weights of integers with scales, as NNCF does.

    Those of 8 bits have a scale for each channel; those of 4 a scale and a zero point for each of
    the groups that torchao has, or stay as they are where it has none.
    """
    for one in model.get_ordered_ops():
        weights = one.input_value(1).get_node() if one.get_type_name() == "MatMul" else None
        if weights is None or weights.get_type_name() != "Constant":
            continue
        is_transposed = one.get_attributes()["transpose_b"]
        floats = weights.data if is_transposed else weights.data.T
        group = group_of(*floats.shape)
        if w_type is DType.S8:
            scaled = _bytes_of(floats)
        elif group is None:
            continue
        else:
            scaled = _four_bits_of(floats, group)
        if not is_transposed:
            ops = import_module("openvino.opset8")
            scaled = ops.transpose(scaled, ops.constant([1, 0]))
        one.input(1).replace_source_output(scaled.output(0))


def _bytes_of(floats: Any) -> Any:  # noqa: ANN401 - an array (n, k), and a node
    ops, numpy = import_module("openvino.opset8"), import_module("numpy")
    scales = numpy.abs(floats).max(axis=1, keepdims=True) / _LARGEST
    scales[scales == 0] = 1
    constant = ops.constant(numpy.round(floats / scales).astype("int8"))
    return ops.multiply(ops.convert(constant, "f32"), ops.constant(scales))


def _four_bits_of(floats: Any, group: int) -> Any:  # noqa: ANN401 - an array (n, k), and a node
    ops, four_bits = import_module("openvino.opset8"), import_module("openvino").Type.u4
    n, k = floats.shape
    q = quantise_weights(floats, DType.U4.value, group=group)
    assert q.zero_points is not None
    problem = Problem.create(1, n, k, dtype="f32_u4", w_layout=f"nk:g{group}")
    shape = n, k // group, group
    parts = [read_elements(problem, q.w).astype("uint8").reshape(shape), q.zero_points[..., None]]
    elements, zero_points = (
        ops.convert(ops.constant(one, dtype=four_bits), "f32") for one in parts
    )
    centred = ops.subtract(elements, zero_points)
    scaled = ops.multiply(centred, ops.constant(q.scales[..., None]))
    return ops.reshape(scaled, ops.constant([n, k]), special_zero=False)


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
        settings={
            **_SETTINGS,
            "shapes": "of the inputs",
            "INFERENCE_PRECISION_HINT": "as --dtype",
        },
    ),
)
