"""oneDNN, called through its C API: where its versions are, what it names, and how.

This is the only binding: the baseline that kernels are timed beside and what runs where no kernel
is faster are made of the same primitives.
"""

import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gemm_tuner.domain.dtype import DType
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.openmp import OpenMp
from gemm_tuner.libraries.wheels import find_in_wheel, wheel_version

# The packages that bring it along; what is called where none is named comes first.
_WHEELS = ("onednn-cpu-gomp", "onednn-cpu-iomp", "onednn-cpu-tbb", "onednn", "paddlepaddle")
_SYSTEM_FOLDERS = tuple(
    map(Path, ("/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"))
)
_INSTALL = 'pip install "gemm-tuner[onednn]"'
_LIBRARY = "libdnnl.so.3"
_OPENMP = "libgomp"  # not in the wheel
_MISSING = re.compile(r"(?P<name>[^/: ]+): cannot open shared object file")
_MOST_NEEDED = 20
_SYCL_CPU = "libintelocl.so"  # SYCL's driver of the CPU
_SYCL_START_S = 1.0

DATA_TYPES = {
    DType.F16: 1,
    DType.BF16: 2,
    DType.F32: 3,
    DType.S32: 4,
    DType.S8: 5,
    DType.U8: 6,
}

FORMAT_ANY = 1
USER_SCRATCHPAD = 1
FORWARD_INFERENCE = 96
QUERY_IMPLEMENTATION = 8
QUERY_WEIGHTS = 131
QUERY_SCRATCHPAD = 136
SOURCE = 1
OPERAND = 2
DESTINATION = 17
WEIGHTS = 33
SCRATCHPAD = 80
BIAS = 41
SCALES = 4096
ZERO_POINTS = 8192
POST_OP = 32768  # times the number of the post-op, counted from one

Dims = ctypes.c_int64 * 12
_CPU = 1
_IN_ORDER = 1
_NAME = ctypes.c_char_p
_NUMBER = ctypes.c_int
_OBJECT = ctypes.c_void_p
_NEW_OBJECT = ctypes.POINTER(ctypes.c_void_p)


class ExecutionArgument(ctypes.Structure):
    """`dnnl_exec_arg_t`."""

    _fields_ = (("argument", ctypes.c_int), ("memory", ctypes.c_void_p))


class _VersionStruct(ctypes.Structure):
    """The start of `dnnl_version_t`."""

    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int))


# Functions that return a status, without the prefix dnnl_. Those that make an object write it to
# their first argument.
# fmt: off
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "engine_create": (_NEW_OBJECT, _NUMBER, ctypes.c_size_t),
    "stream_create": (_NEW_OBJECT, _OBJECT, ctypes.c_uint),
    "stream_wait": (_OBJECT,),
    "memory_desc_create_with_strides": (
        _NEW_OBJECT, _NUMBER, ctypes.POINTER(ctypes.c_int64), _NUMBER,
        ctypes.POINTER(ctypes.c_int64)),
    "memory_desc_create_with_tag": (
        _NEW_OBJECT, _NUMBER, ctypes.POINTER(ctypes.c_int64), _NUMBER, _NUMBER),
    "memory_create": (_NEW_OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "memory_set_data_handle": (_OBJECT, _OBJECT),
    "primitive_attr_create": (_NEW_OBJECT,),
    "primitive_attr_set_post_ops": (_OBJECT, _OBJECT),
    "primitive_attr_set_scratchpad_mode": (_OBJECT, _NUMBER),
    "primitive_attr_set_scales_mask": (_OBJECT, _NUMBER, _NUMBER),
    "primitive_attr_set_zero_points_mask": (_OBJECT, _NUMBER, _NUMBER),
    "post_ops_create": (_NEW_OBJECT,),
    "post_ops_append_eltwise": (_OBJECT, _NUMBER, ctypes.c_float, ctypes.c_float),
    "post_ops_append_binary": (_OBJECT, _NUMBER, _OBJECT),
    "matmul_primitive_desc_create": (
        _NEW_OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "inner_product_forward_primitive_desc_create": (
        _NEW_OBJECT, _OBJECT, _NUMBER, _OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "reorder_primitive_desc_create": (
        _NEW_OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT, _OBJECT),
    "primitive_desc_query": (_OBJECT, _NUMBER, _NUMBER, ctypes.POINTER(_NAME)),
    "primitive_create": (_NEW_OBJECT, _OBJECT),
    "primitive_execute": (_OBJECT, _OBJECT, _NUMBER, ctypes.POINTER(ExecutionArgument)),
}
_STATUSES = {1: "out of memory", 2: "invalid arguments", 3: "not implemented"}
# fmt: on


class OneDnnObject:
    """An object of oneDNN, which lives as long as this one."""

    def __init__(self, address: int, destroy: Callable[["OneDnnObject"], object]) -> None:
        self._as_parameter_ = ctypes.c_void_p(address)
        self._destroy = destroy

    @property
    def address(self) -> int:
        """Return the address of the object, which oneDNN takes as a handle."""
        return self._as_parameter_.value or 0

    def __del__(self) -> None:
        """Destroy the object."""
        self._destroy(self)


class OneDnnLibrary(OpenMp):
    """The functions of oneDNN's C API, with an engine for the CPU.

    Versions for other runtimes than OpenMP have their threads from the environment.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._library = library
        self._functions = {}
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, f"dnnl_{name}")
            function.argtypes = arguments
            self._functions[name] = function
        self._query_md = library.dnnl_primitive_desc_query_md
        self._query_md.argtypes = (_OBJECT, _NUMBER, _NUMBER)
        self._query_md.restype = ctypes.c_void_p
        self._size_of = library.dnnl_memory_desc_get_size
        self._size_of.argtypes = (_OBJECT,)
        self._size_of.restype = ctypes.c_size_t
        # It outlives all that is made for it.
        self.engine = ctypes.c_void_p()
        self.call("engine_create", ctypes.byref(self.engine), _CPU, 0)

    @property
    def version(self) -> tuple[int, int, int]:
        """Return the version: (3, 2, 0)."""
        self._library.dnnl_version.restype = ctypes.POINTER(_VersionStruct)
        version = self._library.dnnl_version().contents
        return version.major, version.minor, version.patch

    @property
    def text(self) -> str:
        """Return the name and version: `onednn 3.2.0`."""
        return f"onednn {'.'.join(map(str, self.version))}"

    def address(self, function: str) -> int:
        """Return where a function is, by its name without the prefix `dnnl_`."""
        return ctypes.cast(self._functions[function], ctypes.c_void_p).value or 0

    def call(self, function: str, *arguments: object) -> None:
        """Call a function by its name without the prefix `dnnl_`.

        Raises:
            BaselineMissing: it returns a status that is not success.
        """
        status = self._functions[function](*arguments)
        if status != 0:
            raise BaselineMissing(
                f"dnnl_{function} of oneDNN failed with status {status} "
                f"({_STATUSES.get(status, 'unknown')})."
            )

    def create(self, kind: str, *arguments: object, way: str = "") -> OneDnnObject:
        """Return a new object of a kind such as `memory`, made in one of its ways.

        Raises:
            BaselineMissing: oneDNN refuses the arguments.
        """
        address = ctypes.c_void_p()
        self.call(f"{kind}_create{way}", ctypes.byref(address), *arguments)
        destroyed = "primitive_desc" if kind.endswith("primitive_desc") else kind
        destroy = getattr(self._library, f"dnnl_{destroyed}_destroy")
        return OneDnnObject(address.value or 0, destroy)

    def stream(self) -> OneDnnObject:
        """Return a new stream, which does one thing after the other."""
        return self.create("stream", self.engine, _IN_ORDER)

    def array(self, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> OneDnnObject:
        """Return the description of an array, its strides in elements."""
        type_number = DATA_TYPES[dtype]
        dims, steps = Dims(*shape), Dims(*strides)
        return self.create("memory_desc", len(shape), dims, type_number, steps, way="_with_strides")

    def matrix_in_any_layout(self, shape: tuple[int, int], dtype: DType) -> OneDnnObject:
        """Return the description of a matrix whose layout the primitive chooses."""
        return self.create(
            "memory_desc", 2, Dims(*shape), DATA_TYPES[dtype], FORMAT_ANY, way="_with_tag"
        )

    def query_md(self, description: OneDnnObject, query: int) -> int:
        """Return a memory descriptor that belongs to the description of a primitive."""
        address: int = self._query_md(description, query, 0)
        return address

    def size_bytes(self, memory_desc: int) -> int:
        """Return the size of the memory that a descriptor describes."""
        size: int = self._size_of(memory_desc)
        return size

    def implementation(self, description: OneDnnObject) -> str:
        """Return the name of the implementation that a primitive got, such as `brg:avx512_core`."""
        name = _NAME()
        self.call("primitive_desc_query", description, QUERY_IMPLEMENTATION, 0, ctypes.byref(name))
        return (name.value or b"").decode()


class Installed(NamedTuple):
    """A library of oneDNN: where it is, in which package of which version, how long it starts."""

    path: Path
    package: str
    start_s: float


def installed_onednn() -> tuple[Installed, ...]:
    """Return every oneDNN that is found, the one that this package installs first."""
    found = {}
    for wheel in _WHEELS:
        with suppress(BaselineMissing):
            path = find_in_wheel(wheel, _LIBRARY, install=_INSTALL)
            found[path] = f"{wheel} {wheel_version(wheel, install=_INSTALL)}"
    for folder in _SYSTEM_FOLDERS:
        path = (folder / _LIBRARY).resolve()
        if path.is_file():
            found.setdefault(path, str(path))
    return tuple(
        Installed(path, package, _SYCL_START_S if (path.parent / _SYCL_CPU).is_file() else 0.0)
        for path, package in found.items()
    )


def find_onednn() -> Path:
    """Return the library to call where one suffices.

    Raises:
        BaselineMissing: there is none.
    """
    installed = installed_onednn()
    if not installed:
        raise BaselineMissing(
            f"{_WHEELS[0]} is not installed ({_LIBRARY} was not found); run: {_INSTALL}."
        )
    return installed[0].path


def load_library(path: Path) -> ctypes.CDLL:
    """Return the loaded library, whose names no other library sees.

    What it needs is loaded first where it lies in the same folder, and where it runs on SYCL, the
    CPU is one of its devices: not every package says so.

    Raises:
        BaselineMissing: the system cannot load it.
    """
    if (driver := path.parent / _SYCL_CPU).is_file():
        os.environ.setdefault("OCL_ICD_FILENAMES", str(driver))
    for _needed in range(_MOST_NEEDED):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            missing = _MISSING.match(str(error))
            beside = path.parent / missing["name"] if missing else path
            if beside == path or not beside.is_file():
                raise _not_loaded(error) from error
            load_library(beside)
    raise _not_loaded(OSError(f"{path} needs too many others"))


def _not_loaded(error: OSError) -> BaselineMissing:
    advice = (
        "install it from the system's packages: libgomp1 on Debian, libgomp on RHEL"
        if _OPENMP in str(error)
        else 'run: pip install --force-reinstall "gemm-tuner[onednn]"'
    )
    return BaselineMissing(f"oneDNN does not load: {error}; {advice}.")


@cache
def open_onednn(path: Path | None = None) -> OneDnnLibrary:
    """Return oneDNN, loaded once in a process: the library at `path`, or else what is found first.

    Raises:
        BaselineMissing: it is not installed, or does not load or is another library.
    """
    library = load_library(path or find_onednn())
    try:
        return OneDnnLibrary(library)
    except AttributeError as error:
        raise BaselineMissing(
            f"oneDNN lacks a function: {error}; "
            'run: pip install --force-reinstall "gemm-tuner[onednn]".'
        ) from error
