"""Compute the linear layers of an ONNX model with tuned kernels, inside ONNX Runtime.

    pip install onnx onnxruntime onnxruntime-extensions
    python examples/onnxruntime/run_model.py model.onnx

Each Gemm or MatMul with constant weights becomes an operator of this process, which calls a kernel
where one was tuned, and else the library that is faster; a function after it is fused. The operator
is called through Python, which takes tens of microseconds: this is for layers that take longer.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime_extensions import PyOp, get_library_path, onnx_op

import gemm_tuner

DOMAIN = "ai.onnx.contrib"
OPERATOR = "GemmTunerLinear"
FUNCTIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Gelu": "gelu_erf"}
PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0}  # of a Gemm
LAYERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {}


@onnx_op(
    op_type=OPERATOR,
    inputs=[PyOp.dt_float],
    outputs=[PyOp.dt_float],
    attrs={"layer": PyOp.dt_string},
)
def call(x: np.ndarray, *, layer: str) -> np.ndarray:
    """Compute a layer: x (..., k), y (..., n)."""
    y = LAYERS[layer](x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def replaced(model: onnx.ModelProto, **settings: object) -> onnx.ModelProto:
    """Return a model whose linear layers are computed by `gemm_tuner.linear`.

    Args:
        model: a model in float32; what changes are Gemm, without factors, and MatMul, with
            constant weights.
        settings: those of `gemm_tuner.linear`, such as `source` and `tune`.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph = model.graph
    inputs = {one.name for one in graph.input}  # a caller may give another value of these
    constants = {one.name: one for one in graph.initializer if one.name not in inputs}
    readers = Counter(_names_read(graph))
    nodes = list(graph.node)
    for node in list(nodes):
        layer = _layer_of(node, constants)
        if layer is None:
            continue
        w, bias = layer
        fused = [one for one in nodes if node.output[0] in one.input and _is_fused(one)]
        last = fused[0] if fused and readers[node.output[0]] == 1 else node
        name = f"layer {len(LAYERS)}"
        LAYERS[name] = gemm_tuner.linear(w, bias, FUNCTIONS.get(last.op_type), **settings)
        made = onnx.helper.make_node(
            OPERATOR, [node.input[0]], [last.output[0]], domain=DOMAIN, layer=name
        )
        nodes[nodes.index(node)] = made
        if last is not node:
            nodes.remove(last)
    del graph.node[:]
    graph.node.extend(nodes)
    read = inputs.union(_names_read(graph))
    kept = [one for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return model


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield each name that a graph returns or reads, also in graphs within its nodes."""
    yield from (one.name for one in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_read(inner)


def _layer_of(
    node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Return the weights (n, k) and the bias (n) of a node, None if it is no such layer."""
    factors = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    is_plain = all(factors.get(name, of) == of for name, of in PLAIN.items())
    if node.op_type not in {"Gemm", "MatMul"} or not _is_of_onnx(node) or not is_plain:
        return None
    if any(name not in constants for name in node.input[1:]):
        return None
    w, *rest = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:])
    if w.dtype != np.float32 or w.ndim != 2 or w.size == 0:
        return None
    w = w if factors.get("transB") else w.T
    if any(bias.shape != w.shape[:1] for bias in rest):
        return None
    return w, rest[0] if rest else None


def _is_fused(node: onnx.NodeProto) -> bool:
    return node.op_type in FUNCTIONS and _is_of_onnx(node) and not node.attribute


def _is_of_onnx(node: onnx.NodeProto) -> bool:
    return node.domain in {"", "ai.onnx"}


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session that knows the operator."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def main(path: str) -> None:
    """Run a model as it is and with kernels, on random inputs, and compare."""
    model = onnx.load(path)
    fast = replaced(model)
    plain, session = session_of(model), session_of(fast)
    draw = np.random.default_rng(0)
    inputs = {
        one.name: draw.standard_normal(
            [size if isinstance(size, int) else 16 for size in one.shape], np.float32
        )
        for one in plain.get_inputs()
    }
    for expected, y in zip(plain.run(None, inputs), session.run(None, inputs), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    print(f"{Path(path).name}: {len(LAYERS)} layers, equal to ONNX Runtime's own results")
    for layer in LAYERS.values():
        print(layer.explain())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: run_model.py MODEL.onnx")
    main(sys.argv[1])
