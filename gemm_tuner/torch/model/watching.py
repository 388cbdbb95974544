"""What this thread calls kernels with, for as long as it watches."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gemm_tuner.abi import ArgsStruct, WeightsStruct
from gemm_tuner.torch.operators import library

# Is told of the number of a layer, the arguments of a call, whose y it may write to, and its time
# in ns.
OnCall = Callable[[int, ArgsStruct, int], None]

# Is told of the number of a layer, and of the weights of a product that are packed for it.
OnPack = Callable[[int, WeightsStruct], None]

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ArgsStruct), ctypes.c_int64)
_PACK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(WeightsStruct))


@contextmanager
def watching(on_call: OnCall, on_pack: OnPack = lambda _number, _weights: None) -> Iterator[None]:
    """Let functions see each call of a kernel by this thread, in eager mode and compiled.

    What they raise is raised at the end of the block: PyTorch calls them.
    """
    errors: list[BaseException] = []

    def guarded(function: Any, *arguments: Any) -> None:  # noqa: ANN401 - as it is called
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    call = _CALL(lambda number, args, time_ns: guarded(on_call, number, args.contents, time_ns))
    pack = _PACK(lambda number, weights: guarded(on_pack, number, weights.contents))
    watch = library().gemm_tuner_watch
    watch.restype = None
    watch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    watch(ctypes.cast(call, ctypes.c_void_p), ctypes.cast(pack, ctypes.c_void_p))
    try:
        yield
    finally:
        watch(None, None)
    if errors:
        raise errors[0]
