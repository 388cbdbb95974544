"""Arrays of other libraries, without a copy, by the DLPack protocol."""

import ctypes
import sys
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES, is_bfloat16
from gemm_tuner.domain.dtype import DType
from gemm_tuner.errors import InvalidArray

# The kinds of device whose memory a CPU reads: its own, and memory pinned for a GPU.
_READABLE_DEVICES = frozenset({1, 3, 11})
_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 14: "oneapi"}
_NEWEST_VERSION = (1, 0)
_READ_ONLY = 1
# Arrays that never change, whatever their capsules say.
_LIBRARIES_OF_CONSTANTS = frozenset({"jax", "jaxlib"})
_BFLOAT = 4
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_KINDS = {code: kind for kind, code in _CODES.items()}

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _TensorStruct(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedStruct(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (
        ("tensor", _TensorStruct),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


class _VersionedStruct(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _TensorStruct),
    )


# Whoever takes the tensor out of a capsule gives the capsule the second name.
_CAPSULES: dict[bytes, tuple[bytes, type[_ManagedStruct | _VersionedStruct]]] = {
    b"dltensor": (b"used_dltensor", _ManagedStruct),
    b"dltensor_versioned": (b"used_dltensor_versioned", _VersionedStruct),
}

_python = ctypes.pythonapi
_python.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)


class SharedArray(Protocol):
    """An array that speaks DLPack: those of NumPy, PyTorch and others."""

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        """Return a capsule with the tensor."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of device that it lies on, and its number."""


AnyArray = TypeVar("AnyArray", bound=SharedArray)


def element_type(dtype: np.dtype[np.generic]) -> tuple[np.dtype[np.generic], int, int]:
    """Return a type as NumPy and as DLPack name it: the dtype, its code and its bits."""
    code = _BFLOAT if is_bfloat16(dtype) else _CODES[dtype.kind]
    return dtype, code, dtype.itemsize * 8


def as_array(name: str, value: object) -> object:
    """Return a NumPy view of an array that speaks DLPack, and any other value as it is.

    Raises:
        InvalidArray: it lies on another device, its library does not share it, it is masked, or it
            has a tangent.
    """
    if isinstance(value, np.ndarray) and _is_masked(value):
        raise InvalidArray(
            f"{name} is a {type(value).__name__}, whose mask a kernel would not see: "
            f"pass {name}.filled(0), or what else the masked elements stand for."
        )
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack__"):
        return value
    if _has_tangent(value):
        raise InvalidArray(
            f"{name} has a tangent of forward mode, which a kernel would not see: "
            f"pass torch.autograd.forward_ad.unpack_dual({name}).primal."
        )
    shared = cast(SharedArray, value)
    try:
        kind, number = shared.__dlpack_device__()
        capsule = _export(shared) if kind in _READABLE_DEVICES else None
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArray(
            f"{name} is a {type(value).__name__} that its library does not share: {error}; "
            f"pass {name}.detach(), or a dense copy."
        ) from error
    if capsule is None:
        device = _DEVICES.get(int(kind), f"DLPack type {int(kind)}")
        raise InvalidArray(
            f"{name} lies on the device {device} {number}, but kernels run on the CPU: "
            f"pass a copy in its memory, such as {name}.cpu()."
        )
    return _Tensor(name, capsule, library=_library_name(value)).array()


def library_of(array: NDArray[np.generic]) -> str:
    """Return the name of the library whose memory `as_array` returned, or `numpy`."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner.library if isinstance(owner, _Tensor) else "numpy"


def new_result(x: AnyArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> AnyArray:
    """Return a new array of the library that `x` comes from, or of NumPy if that makes none."""
    library = sys.modules.get(_library_name(x))
    # The method of x makes it on the device of x, whatever the default device of the library.
    empty = getattr(x, "new_empty", None) or getattr(library, "empty", None)
    of_type = getattr(library, dtype.name, None)
    if isinstance(x, np.ndarray) or empty is None or of_type is None:
        return cast(AnyArray, np.empty(shape, dtype))
    return cast(AnyArray, empty(shape, dtype=of_type))


def _is_masked(array: NDArray[np.generic]) -> bool:
    # The module of masked arrays is slow to load, and not needed for arrays themselves.
    return type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray)


def _library_name(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _export(value: SharedArray) -> object:
    if getattr(value, "is_neg", bool)():  # of PyTorch, which exports the memory as it is
        raise BufferError("its numbers are the negatives of those in memory, use resolve_neg()")
    try:
        return value.__dlpack__(max_version=_NEWEST_VERSION)
    except TypeError:  # made before DLPack 1.0
        return value.__dlpack__()


def _has_tangent(value: object) -> bool:
    forward_mode: Any = sys.modules.get("torch.autograd.forward_ad")
    if forward_mode is None or forward_mode._current_level < 0:  # noqa: SLF001 - there is no other
        return False
    tensor = sys.modules["torch"].Tensor
    return isinstance(value, tensor) and forward_mode.unpack_dual(value).tangent is not None


class _Tensor:
    """A tensor taken out of its capsule; NumPy arrays on its memory keep it alive."""

    def __init__(self, name: str, capsule: object, *, library: str) -> None:
        self._name = name
        self.library = library
        for unused, (used, struct) in _CAPSULES.items():
            if _python.PyCapsule_IsValid(capsule, unused):
                address = _python.PyCapsule_GetPointer(capsule, unused)
                self._managed = struct.from_address(address)
                self._delete = self._managed.deleter
                _python.PyCapsule_SetName(capsule, used)
                self._address: int = address
                return
        raise InvalidArray(f"{name} gives no DLPack tensor: pass numpy.asarray({name}).")

    def array(self) -> NDArray[np.generic]:
        """Return the array on the memory of the tensor."""
        tensor = self._managed.tensor
        dtype = self._dtype()
        shape = tuple(tensor.shape[: tensor.ndim])
        if not tensor.data and 0 not in shape:
            raise InvalidArray(
                f"{self._name} has no memory of its own, as tensors have while a program is "
                "traced: call the kernel with real ones."
            )
        flags = getattr(self._managed, "flags", 0)
        is_read_only = bool(flags & _READ_ONLY) or self.library in _LIBRARIES_OF_CONSTANTS
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            # NumPy has no bfloat16.
            "typestr": f"<V{dtype.itemsize}",
            "data": ((tensor.data or 0) + tensor.byte_offset, is_read_only),
            "strides": (
                tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
                if tensor.strides
                else None
            ),
        }
        return np.asarray(self).view(dtype)

    def _dtype(self) -> np.dtype[np.generic]:
        tensor = self._managed.tensor
        if tensor.lanes == 1 and tensor.bits % 8 == 0:
            if (tensor.code, tensor.bits) == (_BFLOAT, 16):
                return NUMPY_TYPES[DType.BF16]
            if tensor.code in _KINDS:
                return np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")
        raise InvalidArray(
            f"{self._name} has elements of a type that NumPy lacks (DLPack code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes): convert it."
        )

    def __del__(self) -> None:
        """Give the tensor back to its library."""
        if getattr(self, "_address", 0) and self._delete:
            self._delete(self._address)
