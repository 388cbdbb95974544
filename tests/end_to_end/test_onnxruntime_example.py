"""ONNX Runtime computes the layers of a model by kernels, as the example shows."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from served import PROBLEM, Site

pytestmark = [
    pytest.mark.proof,
    # The example loads them, with PyTorch, in a process of its own.
    pytest.mark.skipif(
        find_spec("onnxruntime_extensions") is None, reason="its extensions are not installed"
    ),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "onnxruntime" / "run_model.py"


def model_of_layers() -> bytes:
    """Return a model of nine products, of which five can be computed by kernels."""
    onnx = pytest.importorskip("onnx")
    draw = np.random.default_rng(1)
    helper, n, k = onnx.helper, PROBLEM.n, PROBLEM.k
    shapes = {
        "w1": (n, k),
        "b1": (n,),
        "w2": (n, n),
        "w3": (n, k),
        "w4": (k, 4),
        "b5": (4, 4),
        "b6": (1,),
        "w7": (4, 4),
        "c8": (4,),
    }
    constants = [
        onnx.numpy_helper.from_array(draw.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    constants.append(onnx.numpy_helper.from_array(np.array(True), "is"))

    def inner(operator: str) -> object:
        y = helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, None)
        node = helper.make_node(operator, ["12", "c8"], ["inner"])
        return helper.make_graph([node], operator, [], [y])

    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["1"], transB=1),
        helper.make_node("Relu", ["1"], ["2"]),  # fused
        helper.make_node("Gemm", ["2", "w2"], ["3"]),
        helper.make_node("Tanh", ["3"], ["4"]),  # not fused: what it reads is read twice
        helper.make_node("Add", ["3", "4"], ["5"]),
        helper.make_node("MatMul", ["5", "w3"], ["6"]),
        helper.make_node("Gemm", ["6", "w4"], ["7"], alpha=0.5),  # left: a factor
        helper.make_node("MatMul", ["6", "w4"], ["8"]),
        helper.make_node("Gemm", ["7", "b5", "8"], ["9"]),  # left: no constant to add
        helper.make_node("Gemm", ["9", "b5", "b6"], ["10"]),  # left: one number for all columns
        helper.make_node("MatMul", ["10", "w7"], ["11"]),  # left: w7 is an input, too
        helper.make_node("MatMul", ["11", "b5"], ["12"]),
        helper.make_node("Relu", ["12"], ["13"]),  # not fused: the branches read 12
        helper.make_node("If", ["is"], ["14"], then_branch=inner("Add"), else_branch=inner("Sub")),
        helper.make_node("Add", ["13", "14"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [PROBLEM.m.high, k]),
            helper.make_tensor_value_info("w7", onnx.TensorProto.FLOAT, [4, 4]),
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        constants,
    )
    opsets = [helper.make_opsetid("", 20)]
    written: bytes = helper.make_model(
        graph, opset_imports=opsets, ir_version=10
    ).SerializeToString()
    return written


def test_a_model_computes_the_same_with_kernels(site: Site, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(model_of_layers())

    done = subprocess.run(
        [sys.executable, EXAMPLE, model],
        capture_output=True,
        text=True,
        env=os.environ | {"GEMM_TUNER_DB": site.settings.database_url},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    first, layer, row, *_others = done.stdout.splitlines()
    assert first == "model.onnx: 5 layers, equal to ONNX Runtime's own results"
    assert layer == f"f32 *x{PROBLEM.n}x{PROBLEM.k} nk bias+relu"
    assert "m = 8: gemm-tuner" in row
