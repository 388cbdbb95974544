"""Write a linear layer as an ONNX model, without the packages `onnx` and `protobuf`.

Source: onnx.proto3 of ONNX (the numbers of the fields), and Protocol Buffers, Encoding.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.epilogue import OperandShape, Step
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.errors import BaselineMissing

X = "x"
Y = "y"

_IR_VERSION = 10
_OPSET = 20  # the first with Gelu
_CONTRIBUTED = "com.microsoft"
_FLOAT = 1  # TensorProto.DataType
_LARGEST_MODEL_BYTES = (2 << 30) - (1 << 20)  # of a protocol buffer

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_STRING = 1, 2, 3

Attribute = float | int | str
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """The operator of a step; its parameters are attributes, or inputs if these have no names."""

    name: str
    attributes: tuple[tuple[str, Attribute], ...] = ()
    parameters: tuple[str, ...] = ()
    domain: str = ""


# fmt: off
_OPERATORS = {
    "bias":       _Operator(name="Add"),
    "add":        _Operator(name="Add"),
    "scale":      _Operator(name="Mul"),
    "mul":        _Operator(name="Mul"),
    "relu":       _Operator(name="Relu"),
    "leaky_relu": _Operator(name="LeakyRelu", parameters=("alpha",)),
    "clamp":      _Operator(name="Clip"),
    "hardswish":  _Operator(name="HardSwish"),
    "sigmoid":    _Operator(name="Sigmoid"),
    "silu":       _Operator(name="QuickGelu", attributes=(("alpha", 1.0),), domain=_CONTRIBUTED),
    "tanh":       _Operator(name="Tanh"),
    "gelu_tanh":  _Operator(name="Gelu", attributes=(("approximate", "tanh"),)),
    "gelu_erf":   _Operator(name="Gelu"),
}
# fmt: on


def write_model(problem: Problem, w: FloatArray, operands: dict[str, FloatArray]) -> bytes:
    """Return the model of a layer in float32.

    Its inputs are `x` and the matrices among the operands, by name; vectors, scalars and w are
    constants in it. Its output is `y`.

    Raises:
        BaselineMissing: there is no operator for a step, or the model is too large.
    """
    if w.nbytes > _LARGEST_MODEL_BYTES:
        raise BaselineMissing(
            f"an ONNX model holds at most 2 GiB, but w takes {w.nbytes} bytes; "
            "choose another baseline."
        )
    rows = problem.m.high
    steps = list(problem.epilogue.steps)
    names = iter(operands)
    constants: dict[str, FloatArray] = {"w": w}
    inputs = {X: (rows, problem.k)}
    product_inputs = [X, "w"]
    if steps and steps[0].kind.name == "bias":
        steps.pop(0)
        name = next(names)
        constants[name] = operands[name]
        product_inputs.append(name)
    transposed = (("transB", 1),) if problem.w_layout is WeightLayout.NK else ()
    value = "product" if steps else Y
    nodes = [_node(_Operator(name="Gemm", attributes=transposed), product_inputs, value)]
    for number, step in enumerate(steps):
        read = [value]
        if step.kind.operand is not OperandShape.NONE:
            name = next(names)
            read.append(name)
            if step.kind.operand is OperandShape.MATRIX:
                inputs[name] = (rows, problem.n)
            else:
                constants[name] = operands[name]
        operator = _operator_of(step, problem)
        for index, parameter in enumerate(() if operator.parameters else step.parameters):
            name = f"step{number}_parameter{index}"
            constants[name] = np.full((), parameter, np.float32)
            read.append(name)
        value = Y if number == len(steps) - 1 else f"step{number}"
        nodes.append(_node(operator, read, value, step.parameters))
    graph = b"".join(
        (
            *(_bytes(1, node) for node in nodes),
            _text(2, "layer"),
            *(_bytes(5, _tensor(name, array)) for name, array in constants.items()),
            *(_bytes(11, _declaration(name, shape)) for name, shape in inputs.items()),
            _bytes(12, _declaration(Y, (rows, problem.n))),
        )
    )
    opsets = (_number(2, _OPSET), _text(1, _CONTRIBUTED) + _number(2, 1))
    return _number(1, _IR_VERSION) + _bytes(7, graph) + b"".join(_bytes(8, one) for one in opsets)


def _operator_of(step: Step, problem: Problem) -> _Operator:
    operator = _OPERATORS.get(step.kind.name)
    if operator is None:
        raise BaselineMissing(
            f"ONNX has no operator for the step {step.text!r} of {problem.text}; "
            "choose another baseline."
        )
    return operator


def _node(
    operator: _Operator, inputs: Iterable[str], output: str, parameters: Iterable[float] = ()
) -> bytes:
    named = zip(operator.parameters, parameters, strict=False)
    return b"".join(
        (
            *(_text(1, name) for name in inputs),
            _text(2, output),
            _text(4, operator.name),
            *(_bytes(5, _attribute(*pair)) for pair in (*operator.attributes, *named)),
            _text(7, operator.domain),
        )
    )


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, _ATTRIBUTE_STRING)
    if isinstance(value, int):
        return _text(1, name) + _number(3, value) + _number(20, _ATTRIBUTE_INT)
    stored = _key(2, _FIXED32) + struct.pack("<f", value)
    return _text(1, name) + stored + _number(20, _ATTRIBUTE_FLOAT)


def _tensor(name: str, array: FloatArray) -> bytes:
    dims = b"".join(_number(1, length) for length in array.shape)
    return dims + _number(2, _FLOAT) + _text(8, name) + _bytes(9, array.tobytes())


def _declaration(name: str, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(_bytes(1, _number(1, length)) for length in shape)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, _FLOAT) + _bytes(2, dims)))


def _number(field: int, value: int) -> bytes:
    return _key(field, _VARINT) + _varint(value)


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    return bytes(_groups_of_seven_bits(value))


def _groups_of_seven_bits(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
