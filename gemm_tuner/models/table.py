"""The tables: models, types of numbers, and ways to run a model."""

from functools import partial
from importlib import import_module

from gemm_tuner.models.kinds import decoders, encoders, perceptrons, vision
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

# Of bf16, two roundings of an output. Eager mode rounds most often: torch.compile was no farther
# from f32 in any of nine small models and four whole ones (AMD EPYC, Zen 3, November 2026).
PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(name="f32", tolerance=1e-4, convert=lambda built: built),
        Precision(name="bf16", tolerance=2**-8, times_own=2.0, convert=partial(_cast, "bfloat16")),
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
