"""A compiled kernel, named by the sha256 of its bytes."""

from dataclasses import dataclass

from gemm_tuner.domain.cpu import IsaFeature

ABI_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """What is known of a kernel binary without loading it.

    `toolchain` names the compiler, its version and flags; the same toolchain and source give the
    same bytes.
    """

    sha256: str
    size_bytes: int
    abi_version: int
    required_isa: frozenset[IsaFeature]
    toolchain: str
    source_sha256: str
