"""The kernel ABI of templates/abi/gemm_tuner.h, for ctypes."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

from gemm_tuner.domain.artifact import check_abi_version
from gemm_tuner.errors import KernelRejected

ALIGNMENT_BYTES = 64
OK = 0

_LOADED = count(1)


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies: its address, and the distance between its rows in elements.

    In a batch, the array of the next product lies `batch_stride` elements further, and that of the
    next head `head_stride`.
    """

    address: int
    leading_dimension: int
    batch_stride: int = 0
    head_stride: int = 0


class OperandStruct(ctypes.Structure):
    """`gemm_tuner_operand`: an array that the epilogue reads."""

    _fields_ = (
        ("elements", ctypes.c_void_p),
        ("leading_dimension", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64),
    )


class WeightsStruct(ctypes.Structure):
    """`gemm_tuner_weights`: the weights as the caller stores them."""

    _fields_ = (
        ("size_bytes", ctypes.c_uint64),
        ("elements", ctypes.c_void_p),
        ("leading_dimension", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("zero_points", ctypes.c_void_p),
        ("float_zero_points", ctypes.c_void_p),
    )


class ArgsStruct(ctypes.Structure):
    """`gemm_tuner_args`: what a call works on."""

    _fields_ = (
        ("size_bytes", ctypes.c_uint64),
        ("m", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_leading_dimension", ctypes.c_int64),
        ("x_batch_stride", ctypes.c_int64),
        ("packed_w", ctypes.c_void_p),
        ("packed_w_batch_stride_bytes", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_leading_dimension", ctypes.c_int64),
        ("y_batch_stride", ctypes.c_int64),
        ("operands", ctypes.POINTER(OperandStruct)),
        ("operand_count", ctypes.c_uint64),
        ("workspace", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("w_leading_dimension", ctypes.c_int64),
        ("w_batch_stride", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("x_head_stride", ctypes.c_int64),
        ("w_head_stride", ctypes.c_int64),
        ("y_head_stride", ctypes.c_int64),
        ("operand_head_strides", ctypes.POINTER(ctypes.c_int64)),
        ("v", ctypes.c_void_p),
        ("v_leading_dimension", ctypes.c_int64),
        ("v_batch_stride", ctypes.c_int64),
        ("v_head_stride", ctypes.c_int64),
        ("n", ctypes.c_int64),
    )


_PACKS_IN_PARTS = 3

# Functions of the library: the version of the ABI that has them first, results and arguments.
# fmt: off
_SIGNATURES: tuple[tuple[int, str, type | None, Sequence[type]], ...] = (
    (1, "gemm_tuner_abi_version",         ctypes.c_uint32, ()),
    (1, "gemm_tuner_describe",            ctypes.c_char_p, ()),
    (1, "gemm_tuner_packed_weight_bytes", ctypes.c_uint64, ()),
    (1, "gemm_tuner_pack_weights",        ctypes.c_int32,
     (ctypes.POINTER(WeightsStruct), ctypes.c_void_p)),
    (_PACKS_IN_PARTS, "gemm_tuner_pack_weights_part", ctypes.c_int32,
     (ctypes.POINTER(WeightsStruct), ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)),
    (1, "gemm_tuner_workspace_bytes",     ctypes.c_uint64, (ctypes.c_int32,)),
    (1, "gemm_tuner_preferred_parts",     ctypes.c_int32,  ()),
    (1, "gemm_tuner_phases",              ctypes.c_int32,  ()),
    (1, "gemm_tuner_run",                 ctypes.c_int32,
     (ctypes.POINTER(ArgsStruct), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)),
)
# fmt: on


class KernelLibrary:
    """The functions of one kernel library, loaded into this process.

    A library is never unloaded: a kernel may still be running in another thread.
    """

    def __init__(self, binary: bytes) -> None:
        """Load the library from memory.

        Raises:
            KernelRejected: the system cannot load it, or a function is missing.
            AbiMismatch: it was built for a version of the ABI that this package does not call.
        """
        self.binary = binary
        try:
            self._library = _load(binary)
            version: int = self._library.gemm_tuner_abi_version()
            for since, name, result, arguments in _SIGNATURES:
                if since <= version:
                    function = getattr(self._library, name)
                    function.restype = result
                    function.argtypes = tuple(arguments)
        except (OSError, AttributeError) as error:
            raise KernelRejected(
                f"the kernel library cannot be loaded: {error}; build or fetch it again."
            ) from error
        check_abi_version("the kernel library", version)
        self.phases: int = self._library.gemm_tuner_phases()
        self.preferred_parts: int = self._library.gemm_tuner_preferred_parts()
        self.packed_weight_bytes: int = self._library.gemm_tuner_packed_weight_bytes()
        # For callers in C.
        self.run_address = _address(self._library.gemm_tuner_run)
        self.workspace_bytes_address = _address(self._library.gemm_tuner_workspace_bytes)
        self.pack_address = _address(self._library.gemm_tuner_pack_weights)
        # 0 where the library is too old to pack in parts.
        self.pack_part_address = (
            _address(self._library.gemm_tuner_pack_weights_part)
            if version >= _PACKS_IN_PARTS
            else 0
        )

    def describe(self) -> str:
        """Return the library's description of itself, as JSON."""
        description: bytes = self._library.gemm_tuner_describe()
        return description.decode()

    def workspace_bytes(self, parts: int) -> int:
        """Return the size of the workspace for a call in `parts` parts, in bytes."""
        size: int = self._library.gemm_tuner_workspace_bytes(parts)
        return size

    def pack_weights(
        self, weights: WeightsStruct, packed_w: int, *, part: int = 0, parts: int = 1
    ) -> None:
        """Pack one part of the weights into the memory at address `packed_w`.

        A library that cannot pack in parts packs them all in the first.

        Raises:
            KernelRejected: the kernel is made for weights of another kind.
        """
        if self.pack_part_address:
            status = self._library.gemm_tuner_pack_weights_part(
                ctypes.byref(weights), packed_w, part, parts
            )
        elif part == 0:
            status = self._library.gemm_tuner_pack_weights(ctypes.byref(weights), packed_w)
        else:
            return
        check_packing(status)

    def run(self, args: ArgsStruct, phase: int, part: int, parts: int) -> int:
        """Compute one part of one phase and return the status."""
        status: int = self._library.gemm_tuner_run(ctypes.byref(args), phase, part, parts)
        return status


def check_packing(status: int) -> None:
    """Check what a kernel returned that was to pack weights.

    Raises:
        KernelRejected: it is made for weights of another kind.
    """
    if status != OK:
        raise KernelRejected(
            "the kernel refused the weights: their scales and zero points are not those of its "
            "problem; build or fetch it again."
        )


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]  # a function


def _load(binary: bytes) -> ctypes.CDLL:
    # The loader knows a library by the text of its path, so each needs its own: the numbers of
    # closed descriptors are given again. A path may hold any sequence of "./" and "/".
    unique = f"{next(_LOADED):b}".replace("1", "./").replace("0", "/")
    with os.fdopen(os.memfd_create("gemm-tuner-kernel"), "wb") as file:
        file.write(binary)
        file.flush()
        return ctypes.CDLL(f"/proc/self/{unique}fd/{file.fileno()}", mode=os.RTLD_NOW)


def make_weights(
    elements: int,
    leading_dimension: int,
    *,
    scales: int = 0,
    zero_points: int = 0,
    float_zero_points: int = 0,
) -> WeightsStruct:
    """Return weights as the caller stores them; arrays are given by their addresses, 0 for none."""
    return WeightsStruct(
        size_bytes=ctypes.sizeof(WeightsStruct),
        elements=elements,
        leading_dimension=leading_dimension,
        scales=scales or None,
        zero_points=zero_points or None,
        float_zero_points=float_zero_points or None,
    )


def make_args(
    *,
    m: int,
    x: ArrayView,
    packed_w: int = 0,
    w: ArrayView | None = None,
    v: ArrayView | None = None,
    n: int = 0,
    y: ArrayView,
    operands: Sequence[ArrayView],
    workspace: int,
    batch: int = 1,
    heads: int = 1,
    packed_w_batch_stride_bytes: int = 0,
) -> ArgsStruct:
    """Return the arguments of a call; packed weights and workspace are given by their addresses.

    A linear kernel reads `packed_w`, a product of two activations `w`. Attention reads `n` keys `w`
    and as many values `v`.
    """
    own_w, own_v = w or ArrayView(0, 0), v or ArrayView(0, 0)
    table = _operand_table(len(operands))(
        *(
            OperandStruct(operand.address, operand.leading_dimension, operand.batch_stride)
            for operand in operands
        )
    )
    return ArgsStruct(
        size_bytes=ctypes.sizeof(ArgsStruct),
        m=m,
        batch=batch,
        x=x.address,
        x_leading_dimension=x.leading_dimension,
        x_batch_stride=x.batch_stride,
        packed_w=packed_w,
        packed_w_batch_stride_bytes=packed_w_batch_stride_bytes,
        y=y.address,
        y_leading_dimension=y.leading_dimension,
        y_batch_stride=y.batch_stride,
        operands=table,
        operand_count=len(operands),
        workspace=workspace or None,
        w=own_w.address,
        w_leading_dimension=own_w.leading_dimension,
        w_batch_stride=own_w.batch_stride,
        heads=heads,
        x_head_stride=x.head_stride,
        w_head_stride=own_w.head_stride,
        y_head_stride=y.head_stride,
        operand_head_strides=_head_strides(operands),
        v=own_v.address,
        v_leading_dimension=own_v.leading_dimension,
        v_batch_stride=own_v.batch_stride,
        v_head_stride=own_v.head_stride,
        n=n,
    )


def _head_strides(operands: Sequence[ArrayView]) -> ctypes.Array[ctypes.c_int64] | None:
    strides = [operand.head_stride for operand in operands]
    return (ctypes.c_int64 * len(strides))(*strides) if any(strides) else None


@cache
def _operand_table(size: int) -> type[ctypes.Array[OperandStruct]]:
    return OperandStruct * size  # making a type takes longer than a small kernel
