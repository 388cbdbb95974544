"""Kernels in a folder beside a model that was compiled ahead of time, for a process without us."""

from collections.abc import Iterable
from pathlib import Path

import torch

from gemm_tuner.domain.cpu import isa_text
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.torch.operators import OperatorLayer, PlacedKernel, library, library_path
from gemm_tuner.trust.files import write_publicly

LIBRARY_NAME = "libgemm_tuner_torch.so"
_LAYERS_NAME = "layers.txt"
_FIRST_LINE = "gemm-tuner layers 3"


def write_kernels(folder: Path, layers: Iterable[OperatorLayer]) -> Path:
    """Write the operators and the kernels of some layers; return the path of the operators.

    Raises:
        StoreFailed: the folder cannot be written.
        GemmTunerError: the operators cannot be built.
    """
    lines = [_FIRST_LINE]
    try:
        for layer in layers:
            lines.append(_layer_line(layer))
            for placed in layer.kernels:
                name = f"{placed.kernel.artifact.sha256}.so"
                write_publicly(folder / name, placed.kernel.native.binary)
                lines.append(_kernel_line(placed, name))
        write_publicly(folder / LIBRARY_NAME, library_path().read_bytes())
        write_publicly(folder / _LAYERS_NAME, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise StoreFailed(
            f"kernels cannot be written to {str(folder)!r}: {error.strerror}; "
            "give a folder that can be written."
        ) from error
    return folder / LIBRARY_NAME


def load_kernels(folder: str | Path) -> None:
    """Load what `write_kernels` wrote, so that a model that was compiled with it runs here.

    A process without Python loads the library in the folder instead, which finds the rest. The
    folder holds code: load only what comes from where you would load a model from.

    Raises:
        InvalidSetting: the folder holds no such kernels, or they do not run on this machine.
        GemmTunerError: the operators cannot be built.
    """
    library()
    try:
        torch.ops.gemm_tuner.read_layers(str(Path(folder).resolve()))
    except RuntimeError as error:
        first, _newline, _trace = str(error).partition("\n")
        raise InvalidSetting(f"the kernels in {str(folder)!r} cannot be used: {first}") from error


def _layer_line(layer: OperatorLayer) -> str:
    steps = ",".join(map(str, layer.step_numbers)) or "-"
    problem = layer.problem
    return (
        f"layer {layer.number} {problem.columns.text} {problem.k} {layer.packed_bytes} "
        f"{layer.group} {layer.type_number} {layer.weights_number} {steps}"
    )


def _kernel_line(placed: PlacedKernel, name: str) -> str:
    kernel = placed.kernel
    low, high = placed.rows
    features = isa_text(kernel.artifact.required_isa)
    return (
        f"kernel {name} {low} {high} {placed.packed_offset} {int(placed.is_packer)} "
        f"{kernel.threads} {features} {kernel.problem.text}"
    )
