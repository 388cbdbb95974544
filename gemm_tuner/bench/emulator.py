"""Emulate features that this CPU lacks: kernels are proved with them, and never timed.

The instructions are computed by native/emulator, in the handler of the signal that refuses them.
"""

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

from gemm_tuner.bench.crash import Report
from gemm_tuner.build.compile import Build, compile_hosted
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.resources import bench_native_dir
from gemm_tuner.runtime.load import Kernel, load_kernel

_AMX = frozenset(
    {IsaFeature.AMX_TILE, IsaFeature.AMX_BF16, IsaFeature.AMX_INT8, IsaFeature.AMX_FP16}
)
_EMULABLE = _AMX | {IsaFeature.AVX512_FP16}

# The emulator itself computes with these.
_ITS_ISA = frozenset({IsaFeature.AVX2, IsaFeature.FMA})
_PARTS = ("tiles", "products", "half", "decode", "patches", "emulator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Features to emulate, and the library that does it."""

    features: frozenset[IsaFeature]
    library: Path


def plan_emulation(
    required: frozenset[IsaFeature], *, cpu: Cpu, toolchain: Toolchain
) -> Emulation | None:
    """Return how to run what needs `required` on `cpu`, if emulation is needed and is enough.

    Raises:
        CompilationFailed: the compiler refused the emulator.
        StoreFailed: the build cache is not writable.
    """
    missing = required - cpu.isa
    if not missing or not can_prove(required, cpu=cpu):
        return None
    return Emulation(features=missing, library=build_emulator(toolchain))


def can_prove(required: frozenset[IsaFeature], *, cpu: Cpu) -> bool:
    """Return whether `cpu` runs what needs `required`, with what can be emulated."""
    missing = required - cpu.isa
    # Tiles are those of the CPU or those of the emulator: its products cannot be mixed with ours.
    has_tiles = bool(missing & _AMX) and IsaFeature.AMX_TILE in cpu.isa
    return not missing or (missing <= _EMULABLE and cpu.isa >= _ITS_ISA and not has_tiles)


def build_emulator(toolchain: Toolchain) -> Path:
    """Build the emulator or take it from the cache; return the path of the library.

    Raises:
        CompilationFailed: the compiler refused it.
        StoreFailed: the build cache is not writable.
    """
    folder = bench_native_dir() / "emulator"
    text = "\n".join((folder / f"{part}.c").read_text() for part in _PARTS)
    return compile_hosted(text, name="emulator", toolchain=toolchain, isa=_ITS_ISA)


class Emulator:
    """Executes in this process what the CPU refuses, from `start` to `stop`.

    It does so in every thread that does not block signals, as the workers of our pool do.
    """

    def __init__(self, library: Path) -> None:
        """Load a built emulator."""
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_start.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
        )

    def start(self, report: Report, *, has_one_thread: bool = False) -> None:
        """Emulate from now on; `report` gets the reason if an instruction is refused.

        In a process that has one thread, and stays so, an instruction costs a signal only once:
        then a jump to the emulator stands in its place.
        """
        self._library.emulator_start(
            report.refusal_address, report.REFUSAL_BYTES, int(has_one_thread)
        )

    def stop(self) -> None:
        """Leave illegal instructions to the handler that was there before, and code as it was."""
        self._library.emulator_stop()


def load_for_proof(
    build: Build, *, cpu: Cpu, emulation: Emulation | None, report: Report
) -> Kernel:
    """Load a kernel in a child that will do nothing but prove it, and emulate what it needs.

    Raises:
        IsaNotUsable: the kernel needs features that are neither usable here nor emulated.
        KernelRejected: the system cannot load it.
    """
    if emulation is None:
        return load_kernel(build.binary, artifact=build.artifact, cpu=cpu)
    Emulator(emulation.library).start(report, has_one_thread=True)
    extended = replace(cpu, isa=cpu.isa | emulation.features)
    return load_kernel(build.binary, artifact=build.artifact, cpu=extended)
