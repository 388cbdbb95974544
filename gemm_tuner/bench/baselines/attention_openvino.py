"""Attention by OpenVINO's CPU plugin: one operation, or two products and a softmax between them."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from gemm_tuner.bench.baselines.attention_terms import check_float32, heads_of, terms_of
from gemm_tuner.bench.baselines.baseline import Copy, Package, Row
from gemm_tuner.bench.baselines.openvino import WHEEL, CpuPlugin, openvino_text
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.ways import BaselineOfWays, Call, threads_to_try, told_threads
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.wheels import installed_wheels

_START_S = 1.0
_OPERATORS = "openvino.opset13"  # the first with ScaledDotProductAttention

# Nodes, and the modules that make them, of a package that may not be there.
Node = Any


class OpenVinoAttention(BaselineOfWays):
    """A model with queries, keys, values and y bound to its tensors.

    The plugin fuses two products and a softmax into one kernel, and has another for the operation
    that is attention. It is imported when it is needed, because it starts threads.
    """

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        super().__init__()
        self.text = openvino_text()

    def check_problem(self, problem: Problem) -> None:
        """Refuse other types than float32.

        Raises:
            BaselineMissing: the problem has other types.
        """
        check_float32("OpenVINO", problem)

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: OpenVINO refuses a model.
        """
        self._plugin = plugin = CpuPlugin()
        ways = {
            told_threads(name, workload, threads): partial(
                _make_call, plugin, workload, attend, threads
            )
            for threads in threads_to_try(workload)
            for name, attend in _WAYS.items()
        }
        call = self.fastest(workload, ways)
        return PythonRunner(workload, lambda _w: call)


def _make_call(
    plugin: CpuPlugin, workload: Workload, attend: Callable[..., Node], threads: int
) -> Call:
    operators = import_module(_OPERATORS)
    terms = terms_of(workload)
    assert workload.v is not None
    q, k, v, y = heads_of(workload.x, workload.w, workload.v, workload.y)
    arrays = {"q": q, "k": k, "v": v}
    mask = None if terms.mask is None else terms.mask[np.newaxis, np.newaxis]
    is_known = mask is None or "add" not in workload.operands  # what causal hides is no input
    if mask is not None and not is_known:
        arrays["mask"] = mask
    nodes = {
        name: operators.parameter(array.shape, np.float32, name=name)
        for name, array in arrays.items()
    }
    inputs = list(nodes.values())
    if mask is not None and is_known:
        nodes["mask"] = operators.constant(mask)
    result = attend(operators, scale=operators.constant(np.float32(terms.scale)), **nodes)
    for name, node in nodes.items():
        node.output(0).get_tensor().set_names({name})
    model = import_module(WHEEL).Model([result], inputs)
    return plugin.compiled(model, arrays, y, threads=threads, text=workload.problem.text)


def _by_operation(
    operators: Any,  # noqa: ANN401 - a module of an optional package
    *,
    q: Node,
    k: Node,
    v: Node,
    scale: Node,
    mask: Node | None = None,
) -> Node:
    mask = operators.constant(np.float32(0)) if mask is None else mask
    return operators.scaled_dot_product_attention(q, k, v, mask, scale)


def _by_products(
    operators: Any,  # noqa: ANN401 - as above
    *,
    q: Node,
    k: Node,
    v: Node,
    scale: Node,
    mask: Node | None = None,
) -> Node:
    # There are fewer queries than scores, and fewer of them than keys beside a cache.
    scores = operators.matmul(operators.multiply(q, scale), k, transpose_a=False, transpose_b=True)
    scores = scores if mask is None else operators.add(scores, mask)
    weights = operators.softmax(scores, -1)
    return operators.matmul(weights, v, transpose_a=False, transpose_b=False)


_WAYS = {"ScaledDotProductAttention": _by_operation, "MatMul, Softmax, MatMul": _by_products}


def _find(_materials: object) -> list[Copy]:
    library = OpenVinoAttention()
    return [Copy(package=library.text, baseline=library, start_s=_START_S)]


ROWS = (
    Row(
        name="openvino-attention",
        place=25,
        find=_find,
        installed=lambda: [Package(text, _START_S) for text in installed_wheels(WHEEL)],
        is_raced=True,
        takes_activations=True,
        attends=True,
        attention_alone=True,
        is_usual=False,
    ),
)
