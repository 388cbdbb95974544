# The interface of native/module.c.

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from gemm_tuner.arrays.dlpack import AnyArray, SharedArray
from gemm_tuner.arrays.packed import PackedWeights

ElementType: TypeAlias = tuple[np.dtype[np.generic], int, int]

GEMM_TUNER_ABI_VERSION: int
SOURCE_SHA256: str

class DirectCall:
    def prepare(
        self,
        *,
        run: int,
        workspace_bytes: int,
        phases: int,
        threads: int,
        parts: int,
        m: tuple[int, int],
        n: int,
        k: int,
        x_type: ElementType,
        y_type: ElementType,
        packed_type: type[PackedWeights],
        owner: str,
        new_result: Callable[[SharedArray, tuple[int, int], np.dtype[np.generic]], SharedArray],
        operands: tuple[tuple[str, int, ElementType], ...],
        w_type: ElementType | None,
        w_shape: tuple[int, int],
    ) -> None: ...
    def __call__(
        self,
        x: AnyArray,
        packed: PackedWeights | SharedArray,
        v: object = None,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray: ...

def run_parts(run: int, args: int, phases: int, parts: int, threads: int, /) -> int: ...
def pack(
    pack: int,
    weights: int,
    packed: int,
    stride_bytes: int,
    count: int,
    parts: int,
    threads: int,
    /,
) -> int: ...
def configure_pool(threads: int, cpus: tuple[int, ...] | None, /) -> None: ...
def locate(array: object, element_type: ElementType, /) -> tuple[int, int, int] | None: ...
def set_quantise_types(
    f32: ElementType,
    bf16: ElementType,
    f16: ElementType,
    s8: ElementType,
    u8: ElementType,
    s32: ElementType,
    /,
) -> None: ...
def quantise(
    x: object, y: object, scales: object, zero_points: object, is_one_scale: bool, /
) -> bool: ...
def quantise_at(
    rows: int,
    columns: int,
    x: int,
    x_distance: int,
    y: int,
    y_distance: int,
    scales: int,
    zero_points: int,
    x_type: int,
    is_one_scale: bool,
    /,
) -> None: ...
def seal(direct: type[DirectCall], name: str, doc: str | None, /) -> type[DirectCall]: ...
