"""The operators in C++ (native/operators.cpp): built at first use, and told of kernels.

They are compiled against the headers of the PyTorch that is installed, by gcc or clang: PyTorch is
built with GNU's C++ library, which zig does not link with.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from gemm_tuner.abi import ALIGNMENT_BYTES
from gemm_tuner.build.extension import compile_extension
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.step_kind import OperandShape
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import InvalidSetting, ToolchainMissing
from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime.load import Kernel

TYPES: dict[Any, str] = {torch.float32: "f32", torch.bfloat16: "bf16"}

# As native/operators.cpp numbers them.
_TYPE_NUMBERS = {
    name: number
    for number, name in enumerate(
        (
            *("f32", "bf16", "u8_s8_s32_f32", "u8_s8_s32_u8", "u8_s8_s32_s8"),
            *("s8_s8_s32_f32", "s8_s8_s32_u8", "s8_s8_s32_s8"),
            *("f32_s8_f32_f32", "bf16_s8_f32_bf16", "f32_u4_f32_f32", "bf16_u4_f32_bf16"),
        )
    )
}
STEP_NUMBERS = {
    name: number
    for number, name in enumerate(
        (
            *("bias", "add", "relu", "leaky_relu", "clamp", "hardswish", "sigmoid", "tanh"),
            *("silu", "gelu_erf", "gelu_tanh", "elu", "mish"),
            *("x_zero_point", "channel_scale", "scale", "y_zero_point", "clamp:0:127"),
            "causal",
        )
    )
}
_MOST_STEPS, _MOST_OPERANDS = 12, 6

# How w comes to a kernel, as native/steps.h numbers it.
_PACKED, _KEYS = 0, 3
_IN_CALLS = {WeightLayout.NK: 1, WeightLayout.KN: 2}
# What products of two activations and attention read, and of which types they are.
_STEPS_OF_MATMUL = frozenset({"bias", "add", "scale"})
# What a chain over packed weights may read several of.
_VECTORS = frozenset({"bias", "channel_scale"})

# The number in the place of a layer's of weights that oneDNN packed, as native/eager.h has it.
BY_ONEDNN = -1

_SOURCE = Path(__file__).parent / "native" / "operators.cpp"
# One before those in it.
_HEADERS = (
    "steps",
    "layers",
    "layers_file",
    "rows",
    "calls",
    "matmul",
    "groups",
    "attention",
    "onednn",
    "packing",
    "patches",
    "unpacking",
    "frozen",
    "eager",
    "shims",
)
_LIBRARIES = ("torch_cpu", "c10")
_NUMBER_BITS = 62
_LOADING = Lock()


class _LayerFacts(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("n_low", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("packed_bytes", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("w", ctypes.c_int32),
        ("step_count", ctypes.c_int32),
        ("steps", ctypes.c_int32 * _MOST_STEPS),
    )


class _KernelEntry(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("pack", ctypes.c_void_p),
        ("pack_part", ctypes.c_void_p),
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
class PlacedKernel:
    """A kernel of a layer: where its format of the weights lies, and whether it packs it."""

    kernel: Kernel
    packed_offset: int
    is_packer: bool

    @property
    def rows(self) -> tuple[int, int]:
        """Return the least and the greatest number of rows."""
        m = self.kernel.problem.m
        return m.low, m.high


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLayer:
    """A layer that the operators know by its `number`; `packed_bytes` of weights, all formats.

    Kernels for few numbers of rows stand before those for many.
    """

    number: int
    problem: Problem
    packed_bytes: int
    kernels: tuple[PlacedKernel, ...]

    @property
    def type_number(self) -> int:
        """Return its type as the operators number it."""
        return _TYPE_NUMBERS[self.problem.types.text]

    @property
    def group(self) -> int:
        """Return how many weights along k share a scale, 0 where they have none."""
        return self.problem.w_group or 0

    @property
    def weights_number(self) -> int:
        """Return how its kernels get w, as the operators number it."""
        operation = self.problem.operation
        if operation.has_values:
            return _KEYS
        return _PACKED if operation.packs_ahead else _IN_CALLS[self.problem.w_layout]

    @property
    def step_numbers(self) -> list[int]:
        """Return the steps of its epilogue as the operators number them."""
        return [STEP_NUMBERS[one.text] for one in self.problem.epilogue.steps]

    def takes(self, x: Any, bias: Any, dtype: Any) -> bool:  # noqa: ANN401 - tensors
        """Return whether kernels compute x of this type with a bias, in some number of rows."""
        return bool(
            x.dtype is dtype
            and x.is_cpu
            and x.layout is torch.strided
            and not x.is_nested  # it has no sizes
            and x.numel()
            and x.dim()
            and x.shape[-1] == self.problem.k
            and self._adds(bias, dtype)
        )

    def _adds(self, bias: Any, dtype: Any) -> bool:  # noqa: ANN401 - a tensor or None
        """Return whether kernels add a bias as it is: it may have been changed since."""
        if not self.problem.epilogue.steps:
            return bias is None
        shape = (self.problem.n,)
        return bias is not None and bias.dtype is dtype and bias.shape == shape and bias.is_cpu

    def kernel_for(self, rows: int) -> PlacedKernel | None:
        """Return the kernel that computes this many rows, as the operators choose it."""
        held = (one for one in self.kernels if one.rows[0] <= rows <= one.rows[1])
        return next(held, None)

    def holds(self, low: int, high: int | None = None) -> bool:
        """Return whether there is a kernel for each number of rows from `low` to `high`."""
        at = low
        for first, last in sorted(one.rows for one in self.kernels):
            if first <= at <= last:
                at = last + 1
        return at > (low if high is None else high)


def count_parts(kernel: Kernel) -> int:
    """Return in how many parts the operators call a kernel for one product now."""
    threads: int = torch.get_num_threads()
    return min(threads, kernel.native.preferred_parts) if threads == kernel.threads else threads


def library() -> ctypes.CDLL:
    """Build the operators if they are not in the cache, load them, and return their C interface.

    Raises:
        ToolchainMissing: neither gcc nor clang is installed.
        CompilationFailed: the compiler refused PyTorch's headers.
        StoreFailed: the build cache is not writable.
    """
    with _LOADING:  # what is cached may be computed twice, and PyTorch is told of it once
        return _library()


@cache
def _library() -> ctypes.CDLL:
    path = library_path()
    torch.ops.load_library(str(path))
    native = ctypes.CDLL(str(path))
    native.gemm_tuner_add_layer.restype = None
    native.gemm_tuner_add_layer.argtypes = (
        ctypes.POINTER(_LayerFacts),
        ctypes.POINTER(_KernelEntry),
        ctypes.c_int64,
    )
    _register_flop()
    return native


def library_path() -> Path:
    """Return the path of the operators, built if they are not in the cache.

    Raises:
        GemmTunerError: as in `library`.
    """
    return build(_toolchain())


def build(toolchain: Toolchain) -> Path:
    """Return the library of the operators for this PyTorch, compiled or from the cache.

    Raises:
        GemmTunerError: as in `library`.
    """
    root = Path(torch.__file__).parent
    text = _SOURCE.read_text()
    own = (_SOURCE.with_name(f"{name}.h") for name in _HEADERS)
    for header in (*own, templates_dir() / "abi" / "gemm_tuner.h"):
        text = text.replace(f'#include "{header.name}"', header.read_text())
    return compile_extension(
        text,
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


def add_layer(kernels: Sequence[Kernel], name: str = "") -> OperatorLayer:
    """Make kernels that differ in m alone known to the operators, as one layer.

    A `name` makes it a layer of its own, beside others with the same kernels.

    Raises:
        InvalidSetting: their types or operands are none that the operators have.
    """
    layer = _placed(kernels, name)
    steps = layer.step_numbers
    facts = _LayerFacts(
        number=layer.number,
        n_low=layer.problem.columns.low,
        n=layer.problem.n,
        k=layer.problem.k,
        packed_bytes=layer.packed_bytes,
        group=layer.group,
        type=layer.type_number,
        w=layer.weights_number,
        step_count=len(steps),
        steps=(ctypes.c_int32 * _MOST_STEPS)(*steps),
    )
    entries = (_KernelEntry * len(layer.kernels))(*map(_entry, layer.kernels))
    library().gemm_tuner_add_layer(facts, entries, len(entries))
    return layer


def _placed(kernels: Sequence[Kernel], name: str) -> OperatorLayer:
    problem = kernels[0].problem
    if not _is_computed(problem):
        raise InvalidSetting(f"{problem.text!r} is nothing that the operators for PyTorch compute.")
    ordered = sorted(kernels, key=_place)
    packers = {one.packed_format: one for one in reversed(ordered)}
    sizes = [_aligned(one.native.packed_weight_bytes) for one in packers.values()]
    starts = list(accumulate(sizes, initial=0))
    offsets = dict(zip(packers, starts, strict=False))
    return OperatorLayer(
        number=layer_number(ordered, name),
        problem=ordered[0].problem,
        packed_bytes=starts[-1],
        kernels=tuple(
            PlacedKernel(
                kernel=one,
                packed_offset=offsets[one.packed_format],
                is_packer=packers[one.packed_format] is one,
            )
            for one in ordered
        ),
    )


def _is_computed(problem: Problem) -> bool:
    """Return whether the operators compute a problem, with and without a kernel."""
    steps = problem.epilogue.steps
    operands = [one.kind.name for one in steps if one.kind.operand is not OperandShape.NONE]
    once = [one for one in operands if one not in _VECTORS or not problem.operation.packs_ahead]
    is_read = problem.operation.packs_ahead or (
        problem.types.text in TYPES.values() and set(operands) <= _STEPS_OF_MATMUL
    )
    return (
        is_read
        and problem.types.text in _TYPE_NUMBERS
        and (problem.has_zero_points or problem.w_group in (None, problem.k))
        and {one.text for one in steps} <= set(STEP_NUMBERS)
        and len(steps) <= _MOST_STEPS
        and len(operands) <= _MOST_OPERANDS
        and len(once) == len(set(once))
    )


def _place(kernel: Kernel) -> tuple[int, int, str]:
    """Return what kernels of a layer are sorted by: the same layer has one order of weights."""
    m = kernel.problem.m
    return m.high - m.low, m.low, kernel.artifact.sha256


def _entry(placed: PlacedKernel) -> _KernelEntry:
    kernel, native = placed.kernel, placed.kernel.native
    low, high = placed.rows
    return _KernelEntry(
        name=kernel.problem.text.encode(),
        run=native.run_address,
        pack=native.pack_address,
        pack_part=native.pack_part_address or None,
        workspace_bytes=native.workspace_bytes_address,
        m_low=low,
        m_high=high,
        packed_offset=placed.packed_offset,
        is_packer=placed.is_packer,
        phases=native.phases,
        threads=kernel.threads,
        parts=native.preferred_parts,
    )


def layer_number(kernels: Sequence[Kernel], name: str = "") -> int:
    """Return the number of the layer of these kernels, the same in every process."""
    facts = sorted([one.problem.text, one.artifact.sha256, one.threads] for one in kernels)
    return int(identity([name, facts] if name else facts), 16) >> (256 - _NUMBER_BITS)


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

    for one in (torch.ops.gemm_tuner.linear, torch.ops.gemm_tuner.fused_linear):
        register_flop_formula(one)(count)

    def count_products(
        x: Sequence[int], _w: object, *_rest: object, out_shape: Sequence[int]
    ) -> int:
        return 2 * math.prod(out_shape) * x[-1]

    for one in (torch.ops.gemm_tuner.matmul, torch.ops.gemm_tuner.grouped_matmul):
        register_flop_formula(one)(count_products)

    def count_attention(
        q: Sequence[int], k: Sequence[int], _v: object, *_rest: object, **_keywords: object
    ) -> int:
        return 4 * math.prod(q) * k[-2]

    register_flop_formula(torch.ops.gemm_tuner.attention)(count_attention)
