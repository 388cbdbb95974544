"""Write a layer, or a product of two activations, as an ONNX model, by the package `onnx`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.baselines.chain import Chain, Link, split_chain
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.cpu import WHOLE_SUMS_OF_BYTES
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.spelling import OnnxOperator
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import wheel_version
from gemm_tuner.machine.detect import detect_cpu

X = "x"
W = "w"
Y = "y"

_IR_VERSION = 10
_OPSET = 20  # the first with Gelu
_CONTRIBUTED = "com.microsoft"
_LARGEST_MODEL_BYTES = (2 << 30) - (1 << 20)  # of a protocol buffer

_WHEEL = "onnx"
_INSTALL = 'pip install "gemm-tuner[peers]"'

Array = NDArray[Any]


_GEMM = "Gemm"
_MATMUL_INTEGER = OnnxOperator(name="MatMulInteger")
_MATMUL_INTEGER_TO_FLOAT = OnnxOperator(name="MatMulIntegerToFloat", domain=_CONTRIBUTED)
_XOR = OnnxOperator(name="BitwiseXor")
_TRANSPOSE = OnnxOperator(name="Transpose")
_QUANTIZE = OnnxOperator(name="QuantizeLinear")
# A signed byte whose first bit is flipped is an unsigned one that is so much greater.
_FIRST_BIT = 128


def product_text(types: OperandTypes) -> str:
    """Return the operator that multiplies, and what it takes as unsigned bytes instead."""
    if not types.x.is_integer:
        return _GEMM
    moved = " and ".join(name for name, shift in zip("xw", _shifts(types), strict=True) if shift)
    return f"{_operator_of(types).name}: {moved} as u8" if moved else _operator_of(types).name


def write_model(workload: Workload, w: Array) -> bytes:
    """Return the model of a workload with weights w, in the layout of the problem.

    Its inputs are `x` and the matrices among the operands, by name; vectors, scalars and w are
    constants in it. A `w` that comes with each call is an input too. Its output is `y`.

    Raises:
        BaselineMissing: `onnx` is not installed, there is no operator for a step, or the model is
            too large.
    """
    if workload.problem.operation.packs_ahead and w.nbytes > _LARGEST_MODEL_BYTES:
        raise BaselineMissing(
            f"an ONNX model holds at most 2 GiB, but w takes {w.nbytes} bytes; "
            "choose another baseline."
        )
    graph = _Graph()
    chain, problem = split_chain(workload), workload.problem
    # Bytes that shall be greater are read as unsigned ones.
    graph.inputs[X] = workload.x.view(np.uint8) if _shifts(problem.types)[0] else workload.x
    if problem.types.x.is_integer:
        value = _add_product_of_bytes(graph, workload, w, chain)
    else:
        value = _add_product_of_floats(graph, workload, w, chain)
    for link in chain.others:
        value = _add_step(graph, workload, value, link)
    if problem.types.y in {DType.S8, DType.U8}:
        one = graph.constant("y_scale", np.ones((), np.float32))
        zero = _add_zero_point(graph, chain.y_zero_point, problem.types.y)
        graph.add(_QUANTIZE, (value, one, zero))
    return graph.write(workload.y)


@dataclass
class _Graph:
    """The nodes of a model, each with its operator, inputs and parameters; the last computes y."""

    nodes: list[tuple[OnnxOperator, tuple[str, ...], tuple[float, ...]]] = field(
        default_factory=list
    )
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)

    def constant(self, name: str, array: Array) -> str:
        """Keep an array under a name that is not taken yet; return the name."""
        name = f"{name}_{len(self.constants)}"
        self.constants[name] = array
        return name

    def add(
        self, operator: OnnxOperator, inputs: Iterable[str], parameters: Iterable[float] = ()
    ) -> str:
        """Add a node; return the name of its output."""
        self.nodes.append((operator, tuple(inputs), tuple(parameters)))
        return f"value_{len(self.nodes)}"

    def write(self, y: Array) -> bytes:
        """Return the model in the format of ONNX."""
        onnx = _import_onnx()
        outputs = [f"value_{number}" for number in range(1, len(self.nodes))] + [Y]
        nodes = [
            onnx.helper.make_node(
                operator.name,
                inputs,
                [output],
                domain=operator.domain,
                **dict(operator.attributes),
                **dict(zip(operator.parameters, parameters, strict=False)),
            )
            for (operator, inputs, parameters), output in zip(self.nodes, outputs, strict=True)
        ]
        graph = onnx.helper.make_graph(
            nodes,
            "layer",
            [_declaration(onnx, name, array) for name, array in self.inputs.items()],
            [_declaration(onnx, Y, y)],
            [onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opsets = [
            onnx.helper.make_opsetid("", _OPSET),
            onnx.helper.make_opsetid(_CONTRIBUTED, 1),
        ]
        model = onnx.helper.make_model(graph, ir_version=_IR_VERSION, opset_imports=opsets)
        written: bytes = model.SerializeToString()
        return written


def _add_product_of_floats(graph: _Graph, workload: Workload, w: Array, chain: Chain) -> str:
    inputs = [X, _add_w(graph, workload, w)]
    if chain.bias is not None and chain.bias.array is not None:
        inputs.append(graph.constant("bias", chain.bias.array))
    transposed = (("transB", 1),) if workload.problem.w_layout is WeightLayout.NK else ()
    return graph.add(OnnxOperator(name=_GEMM, attributes=transposed), inputs)


def _add_product_of_bytes(graph: _Graph, workload: Workload, w: Array, chain: Chain) -> str:
    problem = workload.problem
    x, x_type, w_zero_point = X, problem.types.x, ""
    is_known = problem.operation.packs_ahead
    x_shift, w_shift = _shifts(problem.types)
    if x_shift:
        x = _add_flip(graph, X, x_shift)
    if w_shift:
        w = w.view(np.uint8)
        w = w ^ np.uint8(w_shift) if is_known else w
        w_zero_point = graph.constant("zero_point", np.full((), w_shift, np.uint8))
    if is_known and problem.w_layout is WeightLayout.NK:
        w = np.ascontiguousarray(w.T)
    multiplied = _add_w(graph, workload, w)
    if not is_known:
        multiplied = _add_flip(graph, multiplied, w_shift) if w_shift else multiplied
        if problem.w_layout is WeightLayout.NK:
            multiplied = graph.add(_TRANSPOSE, (multiplied,))
    inputs = [x, multiplied]
    zero_points = [_add_zero_point(graph, chain.x_zero_point, x_type, x_shift), w_zero_point]
    operator = _operator_of(problem.types)
    if operator is _MATMUL_INTEGER:
        return graph.add(operator, (*inputs, *zero_points))
    for scale in (chain.scale, chain.channel_scale):
        one = np.ones((), np.float32)
        array = one if scale is None or scale.array is None else scale.array
        # A scale of x has no dimension.
        inputs.append(graph.constant("scale", array.reshape(()) if array.size == 1 else array))
    inputs += zero_points
    if chain.bias is not None and chain.bias.array is not None:
        inputs.append(graph.constant("bias", chain.bias.array))
    return graph.add(operator, inputs)


def _add_w(graph: _Graph, workload: Workload, w: Array) -> str:
    """Return the name of w: a constant, or an input where it comes with each call."""
    if workload.problem.operation.packs_ahead:
        return graph.constant(W, w)
    graph.inputs[W] = w
    return W


def _add_flip(graph: _Graph, value: str, first_bit: int) -> str:
    """Return the name of bytes whose first bit is flipped."""
    constant = graph.constant("first_bit", np.full((), first_bit, np.uint8))
    return graph.add(_XOR, (value, constant))


def _operator_of(types: OperandTypes) -> OnnxOperator:
    """Return the operator that multiplies bytes."""
    return _MATMUL_INTEGER if types.y is DType.S32 else _MATMUL_INTEGER_TO_FLOAT


def _shifts(types: OperandTypes) -> tuple[int, int]:
    """Return how much greater the bytes of x and w are in a model than they are given.

    ONNX Runtime multiplies signed x element by element (1.31, without AVX-VNNI-INT8), and its sums
    of signed w saturate where a CPU adds in 16 bits. Its products of unsigned bytes are fast and
    right everywhere.
    """
    saturates = not WHOLE_SUMS_OF_BYTES & detect_cpu().isa
    return (
        _FIRST_BIT if types.x is DType.S8 else 0,
        _FIRST_BIT if types.w is DType.S8 and saturates else 0,
    )


def _add_zero_point(graph: _Graph, link: Link | None, dtype: DType, shift: int = 0) -> str:
    number = 0 if link is None or link.array is None else int(link.array[0])
    limits = np.iinfo(NUMPY_TYPES[dtype])
    if not limits.min <= number <= limits.max:
        raise BaselineMissing(
            f"a zero point of ONNX is from {limits.min} to {limits.max} here, but it is {number}; "
            "choose another baseline."
        )
    moved = np.uint8 if shift else limits.dtype
    return graph.constant("zero_point", np.full((), number + shift, moved))


def _add_step(graph: _Graph, workload: Workload, value: str, link: Link) -> str:
    operator = link.step.kind.onnx
    if operator is None:
        raise BaselineMissing(
            f"ONNX has no operator for the step {link.step.text!r} of {workload.problem.text}; "
            "choose another baseline."
        )
    inputs = [value]
    if link.operand is not None and link.array is not None:
        if link.operand.shape is OperandShape.MATRIX:
            graph.inputs[link.operand.name] = link.array
            inputs.append(link.operand.name)
        else:
            is_column = link.operand.shape is OperandShape.COLUMN_VECTOR
            array = link.array.reshape(-1, 1) if is_column else link.array
            inputs.append(graph.constant(link.operand.name, array))
    parameters = link.step.parameters
    dtype = np.float16 if workload.problem.types.x is DType.F16 else np.float32
    if not operator.parameters:
        inputs += [
            graph.constant("parameter", np.full((), parameter, dtype)) for parameter in parameters
        ]
    return graph.add(operator, inputs, parameters)


def _declaration(onnx: Any, name: str, array: Array) -> object:  # noqa: ANN401 - the package is optional
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, dtype, array.shape)


def _import_onnx() -> Any:  # noqa: ANN401 - the package is optional
    """Return the package.

    Raises:
        BaselineMissing: it is not installed.
    """
    wheel_version(_WHEEL, install=_INSTALL)
    return import_module(_WHEEL)
