from collections.abc import Iterator

import numpy as np
import pytest

from gemm_tuner.bench.baselines.chain import Link, split_chain
from gemm_tuner.bench.baselines.onnx_model import write_model
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.workload import Workload, make_workload
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing

VARINT, BYTES, FIXED32 = 0, 2, 5


def _workload(text: str) -> Workload:
    problem = Problem.parse(text)
    return make_workload(problem, make_inputs(problem, InputKind.NORMAL, 1), threads=1)


def _name(link: Link | None) -> str | None:
    return None if link is None else link.step.kind.name


def _names(text: str) -> dict[str, str | list[str] | None]:
    chain = split_chain(_workload(text))
    return {
        "x_zero_point": _name(chain.x_zero_point),
        "scale": _name(chain.scale),
        "channel_scale": _name(chain.channel_scale),
        "bias": _name(chain.bias),
        "others": [link.step.kind.name for link in chain.others],
        "y_zero_point": _name(chain.y_zero_point),
    }


def test_epilogue_of_bytes_falls_into_the_parts_of_a_quantised_layer() -> None:
    epilogue = "x_zero_point+channel_scale+scale+bias+relu+scale+y_zero_point"

    assert _names(f"u8_s8_s32_u8 4x5x6 nk {epilogue}") == {
        "x_zero_point": "x_zero_point",
        "scale": "scale",
        "channel_scale": "channel_scale",
        "bias": "bias",
        "others": ["relu", "scale"],
        "y_zero_point": "y_zero_point",
    }


def test_second_scale_of_a_kind_is_a_step_like_others() -> None:
    names = _names("s8_s8_s32_f32 4x5x6 nk scale+scale+bias")

    assert names["scale"] == "scale"
    assert names["bias"] is None
    assert names["others"] == ["scale", "bias"]


def test_scales_of_floats_are_steps_like_others() -> None:
    names = _names("f32 4x5x6 nk scale+bias")

    assert names["scale"] is None
    assert names["others"] == ["scale", "bias"]


def test_parts_keep_their_own_operands() -> None:
    workload = _workload("f32 4x5x6 nk bias+add+bias")

    chain = split_chain(workload)

    assert chain.bias is not None
    assert chain.bias.array is workload.operands["bias"]
    assert [
        link.array is workload.operands[name]
        for link, name in zip(chain.others, ("add", "bias_2"), strict=True)
    ] == [True, True]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = varint()
        if key & 7 == VARINT:
            yield key >> 3, varint()
            continue
        length = 4 if key & 7 == FIXED32 else varint()
        yield key >> 3, message[position : position + length]
        position += length


def _all(message: bytes, number: int) -> list[bytes]:
    return [
        value
        for field, value in _fields(message)
        if field == number and value != b"" and isinstance(value, bytes)
    ]


def test_onnx_model_has_the_nodes_and_constants_of_its_layer() -> None:
    workload = _workload("f32 4x5x6 nk bias+gelu_tanh+add+clamp:-1:300")

    (graph,) = _all(write_model(workload, workload.w), 7)

    operators = [_all(node, 4)[0].decode() for node in _all(graph, 1)]
    outputs = [_all(node, 2)[0].decode() for node in _all(graph, 1)]
    constants = [np.frombuffer(_all(tensor, 9)[0], np.float32) for tensor in _all(graph, 5)]
    assert operators == ["Gemm", "Gelu", "Add", "Clip"]
    assert outputs[-1] == "y"
    assert [_all(value, 1)[0].decode() for value in _all(graph, 11)] == ["x", "add"]
    assert np.array_equal(constants[0], workload.w.reshape(-1))
    assert np.array_equal(constants[1], workload.operands["bias"])
    assert [constant.tolist() for constant in constants[2:]] == [[-1.0], [300.0]]


def test_onnx_model_of_bytes_takes_scales_and_zero_point_into_the_product() -> None:
    workload = _workload("s8_s8_s32_s8 4x5x6 nk x_zero_point+scale+channel_scale+bias+y_zero_point")

    (graph,) = _all(write_model(workload, workload.w), 7)

    operators = [_all(node, 4)[0].decode() for node in _all(graph, 1)]
    (w, *_others) = [_all(tensor, 9)[0] for tensor in _all(graph, 5)]
    assert operators == ["MatMulIntegerToFloat", "QuantizeLinear"]
    assert w == np.ascontiguousarray(workload.w.T).tobytes()


def test_onnx_model_without_an_operator_for_a_step_is_refused() -> None:
    workload = _workload("u8_s8_s32_f32 4x5x6 nk x_row_zero_point+scale")

    with pytest.raises(BaselineMissing, match="no operator for the step 'x_row_zero_point'"):
        write_model(workload, workload.w)
