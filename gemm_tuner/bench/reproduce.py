"""One call of a kernel in a folder, beside the exact result: exit code 1 where it is wrong.

    python reproduce.py [FOLDER]

It needs gemm-tuner, and no PyTorch. The folder has what `write_call` wrote: `call.json` says what
the kernel computes and in how many parts, `operands.npz` has x, w, v of attention, what the
epilogue reads, and the packed weights where these are not what the kernel makes of w. A copy of
this file lies beside them.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.bench.inputs import InputKind, Inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import Expected, find_error
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError, InvalidRecord
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import allocate_aligned
from gemm_tuner.runtime.load import Kernel, load_kernel

_FACTS, _OPERANDS, _BINARY, _SCRIPT = "call.json", "operands.npz", "kernel.so", "reproduce.py"
_OWN = ("x", "w", "v", "scales", "zero_points", "packed")  # names of arrays that no epilogue has


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """A call of a kernel: x (m, k), w (n, k) or (k, n), the operands of its epilogue by name.

    `scales` and `zero_points` (n, groups) are of weights that have some, `v` (n, k) the values of
    attention. `packed` are the weights as they were packed, in bytes; None where the kernel is to
    pack w.
    """

    kernel: Kernel
    x: NDArray[Any]
    w: NDArray[Any]
    operands: dict[str, NDArray[Any]] = field(default_factory=dict)
    scales: NDArray[np.float32] | None = None
    zero_points: NDArray[Any] | None = None
    packed: NDArray[np.uint8] | None = None
    parts: int = 1
    v: NDArray[Any] | None = None

    @property
    def expected(self) -> Expected:
        """Return the exact result, and the error that each element may have."""
        problem = _of_keys(self.kernel.problem, self.w)
        inputs = Inputs(
            kind=InputKind.NORMAL,
            x=self.x,
            w=self.w,
            operands={name: np.atleast_1d(one) for name, one in self.operands.items()},
            row_operands=row_operands(problem),
            scales=self.scales,
            zero_points=self.zero_points,
            v=self.v,
        )
        return compute_expected(problem, inputs)

    @property
    def result(self) -> NDArray[Any]:
        """Return what the kernel computes, in one thread."""
        y = self.kernel.compute(
            self.x, self._w, self.v, threads=1, parts=self.parts, **self.operands
        )
        return np.asarray(y)

    @property
    def _w(self) -> Any:  # noqa: ANN401 - as the kernel takes it
        """Return w as the kernel reads it: packed, or as it is of two activations."""
        if not self.kernel.problem.operation.packs_ahead:
            return self.w
        if self.packed is None:
            return self.kernel.pack(self.w, scales=self.scales, zero_points=self.zero_points)
        memory = allocate_aligned(self.packed.size)
        memory[...] = self.packed
        return PackedWeights(owner=self.kernel.packed_format, memory=memory)

    @property
    def error(self) -> str | None:
        """Return in words how far the kernel is from the exact result, None where it is right."""
        result = self.result  # which refuses arrays that it cannot read
        return find_error(self.expected, result)


def row_operands(problem: Problem) -> frozenset[str]:
    """Return the names of the operands that have something for each row of x."""
    shapes = (OperandShape.COLUMN_VECTOR, OperandShape.MATRIX)
    return frozenset(one.name for one in problem.epilogue.operands if one.shape in shapes)


def _of_keys(problem: Problem, w: NDArray[Any]) -> Problem:
    """Return a problem for as many keys as w has; one that is no attention as it is."""
    return problem.with_columns(len(w)) if problem.operation.has_values else problem


def write_call(call: KernelCall, folder: Path) -> None:
    """Write a call with its kernel, and the script that makes it, into a folder.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    artifact = asdict(call.kernel.artifact)
    artifact["required_isa"] = sorted(artifact["required_isa"])
    facts = {
        "problem": call.kernel.problem.text,
        "candidate": call.kernel.candidate.text,
        "parts": call.parts,
        "artifact": artifact,
    }
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    (folder / _BINARY).write_bytes(call.kernel.native.binary)
    arrays = {"x": call.x, "w": call.w, **call.operands}
    others = {name: getattr(call, name) for name in _OWN if name not in arrays}
    arrays |= {name: one for name, one in others.items() if one is not None}
    kept: dict[str, Any] = {name: _as_bytes(one) for name, one in arrays.items()}
    np.savez_compressed(folder / _OPERANDS, **kept)
    (folder / _SCRIPT).write_text(Path(__file__).read_text())


def read_call(folder: Path) -> KernelCall:
    """Return the call in a folder.

    Raises:
        InvalidRecord: it is not what `write_call` wrote.
        OSError: it cannot be read.
        GemmTunerError: its kernel cannot be loaded on this machine.
    """
    try:
        return _read_call(folder)
    except GemmTunerError:
        raise
    except (KeyError, TypeError, ValueError, EOFError, RecursionError, BadZipFile) as error:
        raise InvalidRecord(
            f"the files are damaged ({type(error).__name__}: {error}); let gemm_tuner.torch.debug "
            "write them again."
        ) from error


def _read_call(folder: Path) -> KernelCall:
    facts = json.loads((folder / _FACTS).read_text())
    artifact = facts["artifact"]
    artifact["required_isa"] = frozenset(map(IsaFeature, artifact["required_isa"]))
    artifact["flags"] = tuple(artifact["flags"])
    kernel = load_kernel(
        (folder / _BINARY).read_bytes(), artifact=Artifact(**artifact), cpu=detect_cpu()
    )
    problem = kernel.problem
    types = {one.name: problem.operand_type(one) for one in problem.epilogue.operands}
    types |= {"x": problem.types.x, "w": problem.types.w, "v": problem.types.w}
    with np.load(folder / _OPERANDS) as file:
        arrays = {
            name: file[name].view(NUMPY_TYPES[types[name]]) if name in types else file[name]
            for name in file.files
        }
    given = (arrays.get(name) for name in ("w", "scales", "zero_points"))
    stored = check_weights(_of_keys(problem, arrays["w"]), *given)
    packed = arrays.get("packed")
    size_bytes = kernel.native.packed_weight_bytes
    if packed is not None and (packed.dtype, packed.shape) != (np.uint8, (size_bytes,)):
        raise ValueError(f"packed has {packed.size} of {packed.dtype}, not {size_bytes} bytes")
    return KernelCall(
        kernel=kernel,
        x=arrays["x"],
        w=stored.w,
        scales=stored.scales,
        zero_points=stored.zero_points,
        packed=packed,
        operands={name: one for name, one in arrays.items() if name not in _OWN},
        parts=facts["parts"],
        v=arrays.get("v"),
    )


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of a type that files of NumPy have: they know no bfloat16."""
    return array.view(np.uint16) if array.dtype == NUMPY_TYPES[DType.BF16] else array


def main(folder: Path) -> int:
    """Make the call in a folder, print what came of it, and return the exit code."""
    try:
        call = read_call(folder)
        error = call.error
    except (GemmTunerError, OSError) as refused:
        sys.stderr.write(f"{folder}: {refused}\n")
        return 2
    kernel = f"{call.kernel.problem.text}, kernel {call.kernel.artifact.sha256}"
    sys.stdout.write(f"{kernel}: {error or 'every element is within its bound'}\n")
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
