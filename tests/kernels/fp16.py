"""A CPU with AVX512-FP16, emulated on one without it."""

import ctypes
from dataclasses import replace
from pathlib import Path

from gemm_tuner.build.compile import compile_hosted
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.runtime.detect import detect_cpu

_SOURCE = Path(__file__).parent / "fp16_emulator.c"


class Emulator:
    """Computes the instruction that kernels use where this CPU refuses it."""

    def __init__(self, toolchain: Toolchain) -> None:
        """Build fp16_emulator.c."""
        path = compile_hosted(_SOURCE.read_text(), name="test-fp16-emulator", toolchain=toolchain)
        self._library = ctypes.CDLL(str(path))
        self._library.fp16_multiply_add.argtypes = (ctypes.c_uint16,) * 3
        self._library.fp16_multiply_add.restype = ctypes.c_uint16

    def start(self) -> Cpu:
        """Emulate in this process from now on, and return a CPU that has the feature."""
        self._library.fp16_emulate()
        cpu = detect_cpu()
        return replace(cpu, isa=cpu.isa | {IsaFeature.AVX512_FP16})

    def multiply_add(self, a: int, b: int, total: int) -> int:
        """Return a * b + total; all are bits of float16."""
        return int(self._library.fp16_multiply_add(a, b, total))
