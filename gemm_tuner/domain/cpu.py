"""The CPU a kernel runs on: what it is, and what a program may use of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256

from gemm_tuner.errors import InvalidRecord


class IsaFeature(StrEnum):
    """An instruction-set extension, by the name that Linux gives it in /proc/cpuinfo."""

    FMA = "fma"
    F16C = "f16c"
    AVX2 = "avx2"
    AVX512F = "avx512f"
    AVX512VL = "avx512vl"
    AVX512BW = "avx512bw"
    AVX512DQ = "avx512dq"
    AVX512_BF16 = "avx512_bf16"
    AVX512_VNNI = "avx512_vnni"
    AVX512_FP16 = "avx512_fp16"
    AVX_VNNI = "avx_vnni"
    AMX_TILE = "amx_tile"
    AMX_BF16 = "amx_bf16"
    AMX_INT8 = "amx_int8"
    AMX_FP16 = "amx_fp16"


# Each adds four products of bytes to a sum of 32 bits; without them, pairs are added in 16 bits.
WHOLE_SUMS_OF_BYTES = frozenset({IsaFeature.AVX512_VNNI, IsaFeature.AVX_VNNI})


def parse_isa(names: Iterable[str]) -> frozenset[IsaFeature]:
    """Return the features named; names that gemm-tuner does not use are left out."""
    known = {feature.value: feature for feature in IsaFeature}
    return frozenset(known[name] for name in names if name in known)


def isa_text(features: Iterable[IsaFeature]) -> str:
    """Return the features' names in a fixed order, joined by commas; `x86_64` for none."""
    return ",".join(sorted(feature.value for feature in features)) or "x86_64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Sizes of the data caches, in bytes; 0 where a level is absent or unknown."""

    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU model with the features usable here: CPUID, enabled by the system, permission granted.

    Caches are per core (L1d, L2) and per sharing group (L3). `physical_cores` counts those that
    this process may use.
    """

    vendor: str
    brand: str
    family: int
    model: int
    stepping: int
    isa: frozenset[IsaFeature]
    caches: Caches
    physical_cores: int

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.physical_cores < 1:
            raise InvalidRecord(f"a CPU with {self.physical_cores} cores cannot be used.")

    @property
    def model_key(self) -> str:
        """Return vendor, family and model: the core, whatever a program may use of it."""
        return f"{self.vendor}-{self.family:x}-{self.model:x}"

    @property
    def class_key(self) -> str:
        """Return the micro-architecture class: vendor, family, model and every usable feature.

        The features are named by their widest vector class and a digest of them all.
        """
        return f"{self.model_key}-{self.isa_key}-{_digest_of(self.isa)}"

    @property
    def exact_key(self) -> str:
        """Return the key under which measured verdicts are kept: the class, stepping and caches."""
        caches = self.caches
        return (
            f"{self.class_key}-s{self.stepping:x}"
            f"-{caches.l1d_bytes >> 10}k-{caches.l2_bytes >> 10}k-{caches.l3_bytes >> 10}k"
        )

    @property
    def isa_key(self) -> str:
        """Return the widest vector class in use: amx, avx512, avx2 or x86_64."""
        for key, feature in (
            ("amx", IsaFeature.AMX_TILE),
            ("avx512", IsaFeature.AVX512F),
            ("avx2", IsaFeature.AVX2),
        ):
            if feature in self.isa:
                return key
        return "x86_64"


@lru_cache(maxsize=1024)
def _digest_of(isa: frozenset[IsaFeature]) -> str:
    return sha256(isa_text(isa).encode()).hexdigest()[:8]
