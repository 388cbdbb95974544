"""Calls of the operators in the code that Inductor writes.

With `cpp_wrapper`, Inductor has an operator looked up by its name at each call, and boxes its
arguments. Here it calls the functions of native/shims.h instead. What is compiled ahead of time
goes the ordinary way, so that it loads before the operators do.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import (
    add_layout_constraint,
    add_needs_realized_inputs,
    constrain_to_fx_strides,
    register_lowering,
)
from torch._inductor.virtualized import V

from gemm_tuner.torch.operators import library

_PREFIX = "aoti_torch_cpu_gemm_tuner_"
_ARRAY, _MAYBE = "AtenTensorHandle", "const AtenTensorHandle*"

# The arguments of each before the result, as in native/shims.h.
_ARGUMENTS = {
    "linear": (_ARRAY, _ARRAY, _MAYBE, "int64_t", _MAYBE, _MAYBE),
    "fused_linear": (
        *(_ARRAY, _ARRAY, "const AtenTensorHandle* const*", "int64_t"),
        *("const double*", "int64_t", "int64_t", _MAYBE),
    ),
    "patches": (_ARRAY, *("const int64_t*", "int64_t") * 4),
    "matmul": (_ARRAY, _ARRAY, "int64_t", _MAYBE, _MAYBE, "double"),
    "grouped_matmul": (_ARRAY, _ARRAY, _ARRAY, "int64_t"),
    "attention": (_ARRAY, _ARRAY, _ARRAY, "int64_t", _MAYBE, "double"),
}

# Those that read x row by row.
_OF_ROWS = ("linear", "fused_linear")


@cache
def lower_operators() -> None:
    """Let Inductor write direct calls of the operators from now on.

    Raises:
        GemmTunerError: the operators cannot be built.
    """
    # What Inductor compiles finds the functions among those of the whole process.
    ctypes.CDLL(library()._name, mode=ctypes.RTLD_GLOBAL)  # noqa: SLF001 - it has no public name
    for name in _ARGUMENTS:
        operator = getattr(torch.ops.gemm_tuner, name).default
        add_needs_realized_inputs(operator)
        add_layout_constraint(operator, _constrain)
        register_lowering(operator, type_promotion_kind=None)(_lowering(operator))


def _constrain(node: Any, x: Any, *others: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of Inductor
    """Give an operator its arguments with the order of strides that they have in the graph.

    Rows of a transposed x are no rows in memory. Inductor writes them as such where it computes
    them, which takes less than the operator's copy.
    """
    seen = node.args[0].meta["val"]
    if seen.dim() > 1 and seen.stride(-1) != 1 and _name(node.target) in _OF_ROWS:
        x = ir.ExternKernel.require_contiguous(x)
        (_x, *others), keywords = constrain_to_fx_strides(node, None, *others, **keywords)
        return (x, *others), keywords
    return constrain_to_fx_strides(node, x, *others, **keywords)


def _lowering(operator: Any) -> Any:  # noqa: ANN401 - of PyTorch
    def lower(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of Inductor
        result = _Call.create(operator, *arguments, **keywords)
        # The operators return the sizes and strides that they say. To assert so in C++ takes as
        # long as half of the call.
        result.skip_size_stride_alignment_checks = True
        return ir.TensorBox.create(result)

    return lower


class _Call(ir.FallbackKernel):  # type: ignore[misc]  # without PyTorch, it is Any
    """A call of an operator."""

    def codegen(self, wrapper: Any) -> None:  # noqa: ANN401 - of Inductor
        """Write the call."""
        name = _name(self.op_overload)
        if V.graph.aot_mode:
            super().codegen(wrapper)
        elif V.graph.cpp_wrapper:
            self.cpp_kernel_name = _PREFIX + name
            arguments = ", ".join((*_ARGUMENTS[name], f"{_ARRAY}*"))
            _declare(wrapper, f'extern "C" AOTITorchError {self.cpp_kernel_name}({arguments});')
            with config.patch({"aot_inductor.custom_ops_to_c_shims": {self.op_overload: []}}):
                super().codegen(wrapper)
        else:  # Python, where to look for what calls the dispatcher takes 0.3 µs
            self.python_kernel_name = f"gemm_tuner_{name}"
            _declare(
                wrapper, f"{self.python_kernel_name} = torch.ops.gemm_tuner.{name}.default._op"
            )
            super().codegen(wrapper)


def _name(operator: Any) -> str:  # noqa: ANN401 - of PyTorch
    return str(operator.overloadpacket.__name__)


def _declare(wrapper: Any, line: str) -> None:  # noqa: ANN401 - of Inductor
    """Let what Inductor writes begin with a line, once."""
    if line not in wrapper.header.getvalue():
        wrapper.header.writeline(line)
