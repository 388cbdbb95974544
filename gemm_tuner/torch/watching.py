"""What the operators are called with, for as long as something watches them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from gemm_tuner.torch.operators import library


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCall:
    """One call of a kernel: its layer, what it read, what it computed, and its time in seconds."""

    number: int
    x: Any
    packed: Any
    bias: Any
    other: Any
    y: Any
    seconds: float


# Is told of a call, and returns the y that the model goes on with.
OnCall = Callable[[OperatorCall], Any]

# Is told of the number of a layer, and of the weights (n, k) that were packed for it.
OnPack = Callable[[int, Any], None]


@contextmanager
def watching(on_call: OnCall, on_pack: OnPack = lambda _number, _w: None) -> Iterator[None]:
    """Let `on_call` see each call of a kernel by this thread, in eager mode and compiled."""
    library()
    thread = get_ident()
    linear, pack = (torch.library.get_kernel(f"gemm_tuner::{one}", "CPU") for one in _WATCHED)

    def call(  # noqa: PLR0917 - as the operator is called
        keys: Any,  # noqa: ANN401 - of PyTorch
        x: Any,  # noqa: ANN401 - a tensor
        packed: Any,  # noqa: ANN401 - a tensor
        bias: Any,  # noqa: ANN401 - a tensor
        number: int,
        other: Any = None,  # noqa: ANN401 - a tensor
        w: Any = None,  # noqa: ANN401 - a tensor
    ) -> Any:  # noqa: ANN401 - a tensor
        begin_s = perf_counter()
        y = linear.call_boxed(keys, x, packed, bias, number, other, w)
        seconds = perf_counter() - begin_s
        if get_ident() != thread:
            return y
        return on_call(
            OperatorCall(
                number=number, x=x, packed=packed, bias=bias, other=other, y=y, seconds=seconds
            )
        )

    def pack_weights(keys: Any, w: Any, size_bytes: int, number: int) -> Any:  # noqa: ANN401
        if get_ident() == thread:
            on_pack(number, w)
        return pack.call_boxed(keys, w, size_bytes, number)

    watcher = torch.library.Library("gemm_tuner", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, function in zip(_WATCHED, (call, pack_weights), strict=True):
                watcher.impl(name, function, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        watcher._destroy()  # noqa: SLF001 - nothing public takes an override back


_WATCHED = ("linear", "pack")
