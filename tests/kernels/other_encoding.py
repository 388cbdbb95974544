"""Kernels for AVX-VNNI respelled for a CPU that has its instruction in AVX-512's encoding alone.

What AVX-512 is switched on for may use all of its registers, which older encodings cannot name.
"""

from dataclasses import replace

from gemm_tuner.domain.cpu import IsaFeature, parse_isa
from gemm_tuner.domain.source import Source
from gemm_tuner.machine.detect import detect_cpu

_VEX = frozenset({IsaFeature.AVX_VNNI})
_EVEX = parse_isa(("avx512f", "avx512vl", "avx512_vnni"))
_INSTRUCTION = "%{vex%} vpdpbusd"
_SPELLINGS = {_INSTRUCTION: "%{evex%} vpdpbusd", "vroundps": "vrndscaleps"}


def needed_here(isa: frozenset[IsaFeature]) -> frozenset[IsaFeature]:
    """Return what kernels for `isa` need on this CPU, in the encoding that it has."""
    usable = detect_cpu().isa
    return isa - _VEX | _EVEX if isa & _VEX - usable and usable >= _EVEX else isa


def spelled_for_this_cpu(
    source: Source, isa: frozenset[IsaFeature]
) -> tuple[Source, frozenset[IsaFeature]]:
    """Return a source for `isa` in the encoding that this CPU has, and what it then needs."""
    needed = needed_here(isa)
    if needed == isa:
        return source, isa
    assert _INSTRUCTION in source.text
    text = source.text
    for vex, evex in _SPELLINGS.items():
        text = text.replace(vex, evex)
    return replace(source, text=text), needed
