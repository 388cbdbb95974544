"""Kernels for AVX-VNNI respelled for a CPU that has its instruction in AVX-512's encoding alone."""

import re
from dataclasses import replace

from gemm_tuner.domain.cpu import IsaFeature, parse_isa
from gemm_tuner.domain.source import Source

OF_AVX512 = parse_isa(("avx512f", "avx512vl", "avx512_vnni"))


def in_the_other_encoding(
    source: Source, isa: frozenset[IsaFeature]
) -> tuple[Source, frozenset[IsaFeature]]:
    """Return a source with the same instruction in AVX-512's encoding, and what it then needs."""
    text, count = re.subn(r"%\{vex%\} vpdpbusd", "%{evex%} vpdpbusd", source.text)
    assert count > 0
    return replace(source, text=text), isa - {IsaFeature.AVX_VNNI} | OF_AVX512
