"""The operators in C++ (native/operators.cpp): built at first use, and told of kernels.

They are compiled against the headers of the PyTorch that is installed, by gcc or clang: PyTorch is
built with GNU's C++ library, which zig does not link with.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from gemm_tuner.abi import ALIGNMENT_BYTES
from gemm_tuner.build.extension import compile_extension
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting, ToolchainMissing
from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime.load import Kernel

TYPES: dict[Any, str] = {torch.float32: "f32", torch.bfloat16: "bf16"}

# As native/operators.cpp numbers them.
_TYPE_NUMBERS = {"f32": 0, "bf16": 1}
_OPERAND_NUMBERS = {"bias": 0, "add": 1}

_SOURCE = Path(__file__).parent / "native" / "operators.cpp"
_LIBRARIES = ("torch_cpu", "c10")
_NUMBER_BITS = 62


class _KernelEntry(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("pack", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_void_p),
        ("m_low", ctypes.c_int64),
        ("m_high", ctypes.c_int64),
        ("packed_offset", ctypes.c_int64),
        ("is_packer", ctypes.c_int32),
        ("phases", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parts", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLayer:
    """A layer that the operators know by its `number`; `packed_bytes` of weights, all formats."""

    number: int
    problem: Problem
    packed_bytes: int
    rows: tuple[tuple[int, int], ...]

    def holds(self, low: int, high: int | None = None) -> bool:
        """Return whether there is a kernel for each number of rows from `low` to `high`."""
        at = low
        for first, last in sorted(self.rows):
            if first <= at <= last:
                at = last + 1
        return at > (low if high is None else high)


@cache
def library() -> ctypes.CDLL:
    """Build the operators if they are not in the cache, load them, and return their C interface.

    Raises:
        ToolchainMissing: neither gcc nor clang is installed.
        CompilationFailed: the compiler refused PyTorch's headers.
        StoreFailed: the build cache is not writable.
    """
    path = build(_toolchain())
    torch.ops.load_library(str(path))
    native = ctypes.CDLL(str(path))
    native.gemm_tuner_add_layer.restype = ctypes.c_int32
    native.gemm_tuner_add_layer.argtypes = (
        *(ctypes.c_int64,) * 4,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int64,
        ctypes.POINTER(_KernelEntry),
        ctypes.c_int64,
    )
    _register_flop()
    return native


def build(toolchain: Toolchain) -> Path:
    """Return the library of the operators for this PyTorch, compiled or from the cache.

    Raises:
        GemmTunerError: as in `library`.
    """
    root = Path(torch.__file__).parent
    header = (templates_dir() / "abi" / "gemm_tuner.h").read_text()
    return compile_extension(
        _SOURCE.read_text().replace('#include "gemm_tuner.h"', header),
        name="torch-operators",
        toolchain=toolchain,
        include=root / "include",
        library_dir=root / "lib",
        libraries=_LIBRARIES,
        made_for=f"PyTorch {torch.__version__}",
    )


def _toolchain() -> Toolchain:
    try:
        chosen = find_toolchain()
    except ToolchainMissing:
        chosen = None
    for name in [chosen.name] if chosen and chosen.name != "zig" else ["gcc", "clang"]:
        try:
            return find_toolchain(name)
        except ToolchainMissing:
            continue
    raise ToolchainMissing(
        "the operators for PyTorch need gcc >= 11 or clang >= 14, which PyTorch's own compiler "
        "needs too; install one of them."
    )


def add_layer(kernels: Sequence[Kernel]) -> OperatorLayer:
    """Make kernels that differ in m alone known to the operators, as one layer.

    Raises:
        InvalidSetting: their types or operands are none that the operators have.
    """
    problem = kernels[0].problem
    operands = [operand.name for operand in problem.epilogue.operands]
    if problem.types.text not in _TYPE_NUMBERS or not set(operands) <= set(_OPERAND_NUMBERS):
        raise InvalidSetting(f"{problem.text!r} is nothing that the operators for PyTorch compute.")
    ordered = sorted(kernels, key=lambda one: one.problem.m.high - one.problem.m.low)
    packers = {one.packed_format: one for one in reversed(ordered)}
    sizes = [_aligned(one.native.packed_weight_bytes) for one in packers.values()]
    starts = list(accumulate(sizes, initial=0))
    offsets = dict(zip(packers, starts, strict=False))
    entries = (_KernelEntry * len(ordered))(
        *(
            _KernelEntry(
                run=one.native.run_address,
                pack=one.native.pack_address,
                workspace_bytes=one.native.workspace_bytes_address,
                m_low=one.problem.m.low,
                m_high=one.problem.m.high,
                packed_offset=offsets[one.packed_format],
                is_packer=packers[one.packed_format] is one,
                phases=one.native.phases,
                threads=one.threads,
                parts=one.native.preferred_parts,
            )
            for one in ordered
        )
    )
    number = layer_number(ordered)
    library().gemm_tuner_add_layer(
        number,
        problem.n,
        problem.k,
        starts[-1],
        _TYPE_NUMBERS[problem.types.text],
        (ctypes.c_int32 * len(operands))(*(_OPERAND_NUMBERS[name] for name in operands)),
        len(operands),
        entries,
        len(ordered),
    )
    return OperatorLayer(
        number=number,
        problem=problem,
        packed_bytes=starts[-1],
        rows=tuple((one.problem.m.low, one.problem.m.high) for one in ordered),
    )


def layer_number(kernels: Sequence[Kernel]) -> int:
    """Return the number of the layer of these kernels, the same in every process."""
    facts = [[one.problem.text, one.artifact.sha256, one.threads] for one in kernels]
    return int(identity(sorted(facts)), 16) >> (256 - _NUMBER_BITS)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _register_flop() -> None:
    """Tell PyTorch's counter of floating-point operations what a call computes."""
    from torch.utils.flop_counter import register_flop_formula  # noqa: PLC0415 - imports much

    def count(x: Sequence[int], _packed: object, *_rest: object, out_shape: Sequence[int]) -> int:
        rows = 1
        for length in x[:-1]:
            rows *= length
        return 2 * rows * x[-1] * out_shape[-1]

    register_flop_formula(torch.ops.gemm_tuner.linear)(count)
