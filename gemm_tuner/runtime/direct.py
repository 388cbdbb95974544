"""The call path in C (native/), or its substitute in Python where that was not built."""

import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from gemm_tuner.arrays.dlpack import element_type
from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.resources import call_native_sources, digest_of_sources

__all__ = ["NATIVE", "DirectCall", "sealed"]

_LOG = logging.getLogger(__name__)


def _load() -> ModuleType | None:
    try:
        native = import_module("gemm_tuner.runtime._native")
    except ImportError as error:
        _LOG.debug("Kernels are called through ctypes: %s", error)
        return None
    source = digest_of_sources(call_native_sources())
    if getattr(native, "SOURCE_SHA256", None) != source:
        _LOG.warning(
            "Kernels are called through ctypes: %s was built from other sources; run "
            "python hatch_build.py in a checkout, or install gemm-tuner again.",
            native.__file__,
        )
        return None
    if native.GEMM_TUNER_ABI_VERSION == ABI_VERSION and _knows_arrays(native):
        return native
    _LOG.warning(
        "Kernels are called through ctypes: gemm_tuner.runtime._native was built for another "
        "version of the kernel ABI, or does not know the arrays of NumPy %s; "
        "install gemm-tuner again.",
        np.__version__,
    )
    return None


def _knows_arrays(native: ModuleType) -> bool:
    """Check the fields of an array at the offsets that NumPy's binary interface gives."""
    array = np.zeros((3, 5), np.float32)[:, 1:4]
    found: object = native.locate(array, element_type(array.dtype))
    return found == (array.ctypes.data, 5, 1)


NATIVE = _load()

if TYPE_CHECKING:
    from gemm_tuner.runtime._native import DirectCall
elif NATIVE is not None:
    DirectCall = NATIVE.DirectCall
else:

    class DirectCall:
        """Sends each call to `compute`, which checks its arguments."""

        def prepare(self, **_facts: object) -> None:
            """Take the values that stay the same in all calls of a kernel."""

        def __call__(self, *arguments: object, **named: object) -> object:
            """Return `compute` of the same arguments."""
            return self.compute(*arguments, **named)


def sealed(direct: type[DirectCall]) -> type[DirectCall]:
    """Return a class of the same name whose objects are called by vectorcall.

    From Python 3.12 on, that is the class itself. Before, a class that is written in Python does
    not inherit vectorcall, because its `__call__` may be replaced; a subclass that cannot be
    changed, made in C, does.
    """
    if NATIVE is None or sys.version_info >= (3, 12):
        return direct
    name = f"{direct.__module__}.{direct.__qualname__}"
    made: type[DirectCall] = NATIVE.seal(direct, name, direct.__doc__)
    return made
