from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.chain import Link, split_chain
from gemm_tuner.bench.baselines.onnx_model import write_model
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.workload import Workload, make_workload
from gemm_tuner.domain.cpu import WHOLE_SUMS_OF_BYTES, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.machine.detect import detect_cpu


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


def _graph(workload: Workload) -> Any:  # noqa: ANN401 - of an optional package
    model: Any = pytest.importorskip("onnx").load_from_string(write_model(workload, workload.w))
    return model.graph


def _numbers(tensor: Any) -> NDArray[Any]:  # noqa: ANN401 - of an optional package
    numbers: NDArray[Any] = import_module("onnx.numpy_helper").to_array(tensor)
    return numbers


@pytest.mark.baseline("onnxruntime")
def test_onnx_model_has_the_nodes_and_constants_of_its_layer() -> None:
    workload = _workload("f32 4x5x6 nk bias+gelu_tanh+add+clamp:-1:300")

    graph = _graph(workload)

    constants = [_numbers(tensor) for tensor in graph.initializer]
    assert [node.op_type for node in graph.node] == ["Gemm", "Gelu", "Add", "Clip"]
    assert graph.node[-1].output == ["y"]
    assert [value.name for value in graph.input] == ["x", "add"]
    assert np.array_equal(constants[0], workload.w)
    assert np.array_equal(constants[1], workload.operands["bias"])
    assert [constant.tolist() for constant in constants[2:]] == [-1.0, 300.0]


@pytest.mark.baseline("onnxruntime")
@pytest.mark.parametrize(("isa", "first_bit"), [(frozenset(), 128), (WHOLE_SUMS_OF_BYTES, 0)])
def test_onnx_model_of_bytes_takes_scales_and_zero_point_into_the_product(
    isa: frozenset[IsaFeature], first_bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed x, and w where sums of bytes saturate, become unsigned."""
    workload = _workload("s8_s8_s32_s8 4x5x6 nk x_zero_point+scale+channel_scale+bias+y_zero_point")
    cpu = replace(detect_cpu(), isa=isa)
    monkeypatch.setattr("gemm_tuner.bench.baselines.onnx_model.detect_cpu", lambda: cpu)

    graph = _graph(workload)

    assert [node.op_type for node in graph.node] == [
        "BitwiseXor",
        "MatMulIntegerToFloat",
        "QuantizeLinear",
    ]
    [w] = [one for one in map(_numbers, graph.initializer) if one.shape == workload.w.T.shape]
    assert np.array_equal(w.astype(int), workload.w.T.astype(int) + first_bit)


def test_onnx_model_without_an_operator_for_a_step_is_refused() -> None:
    workload = _workload("u8_s8_s32_f32 4x5x6 nk x_row_zero_point+scale")

    with pytest.raises(BaselineMissing, match="no operator for the step 'x_row_zero_point'"):
        write_model(workload, workload.w)
