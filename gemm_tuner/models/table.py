"""The tables: models, types of numbers, and ways to run a model."""

from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.models.kinds import decoders, encoders, perceptrons, vision
from gemm_tuner.models.quantising import (
    group_of,
    program_with_bytes,
    with_bytes,
    with_weights_of_4_bits,
    with_weights_of_bytes,
)
from gemm_tuner.models.row import Built, Model, Precision, Way
from gemm_tuner.models.ways import compiled, eager, onnx_runtime, openvino, ours, zentorch


def _cast(type_name: str, built: Built) -> Built:
    to = getattr(import_module("torch"), type_name)
    inputs = {
        name: one.to(to) if one.is_floating_point() else one for name, one in built.inputs.items()
    }
    return Built(module=built.module.to(to), inputs=inputs)


MODELS: dict[str, Model] = {
    row.name: row
    for rows in (encoders.ROWS, decoders.ROWS, vision.ROWS, perceptrons.ROWS)
    for row in rows
}


def _cast_with_weights_of_bytes(built: Built) -> Built:
    return with_weights_of_bytes(_cast("bfloat16", built))


def _in_groups(n: int, k: int) -> str | None:
    group = group_of(n, k)
    return None if group is None else f"nk:g{group}"


def _cast_with_weights_of_4_bits(built: Built) -> Built:
    return with_weights_of_4_bits(_cast("bfloat16", built))


# Of rounded ones, two roundings of an output. Eager mode rounds most often: torch.compile was no
# farther from f32 in any of nine small models and four whole ones (AMD EPYC, Zen 3, November 2026).
_ROUNDED: dict[str, Any] = {"tolerance": 2**-8, "times_own": 2.0}
_BY_TORCHAO: dict[str, Any] = {
    **_ROUNDED,
    "needs": "torchao",
    "install": 'pip install "gemm-tuner[torch,torchao]"',
}

PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(
            name="f32", types="f32", other="f32", tolerance=1e-4, convert=lambda built: built
        ),
        Precision(
            name="bf16",
            types="bf16",
            other="bf16",
            convert=partial(_cast, "bfloat16"),
            **_ROUNDED,
        ),
        Precision(
            name="int8",
            types="u8_s8_s32_f32",
            other="f32",
            convert=with_bytes,
            program=program_with_bytes,
            **_BY_TORCHAO,
        ),
        Precision(
            name="bf16_s8",
            types="bf16_s8",
            w_layout=lambda _n, _k: "nk:gk",
            other="bf16",
            convert=_cast_with_weights_of_bytes,
            **_BY_TORCHAO,
        ),
        Precision(
            name="bf16_u4",
            types="bf16_u4",
            w_layout=_in_groups,
            other="bf16",
            convert=_cast_with_weights_of_4_bits,
            **_BY_TORCHAO,
        ),
    )
}

# In the order in which they are prepared: where memory lacks, the last are left out.
WAYS: dict[str, Way] = {
    row.name: row
    for rows in (
        eager.ROWS,
        ours.ROWS,
        zentorch.ROWS,
        openvino.ROWS,
        compiled.ROWS,
        onnx_runtime.ROWS,
    )
    for row in rows
}
