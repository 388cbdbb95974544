import pytest
from samples import CPU, make_artifact

from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.errors import AbiMismatch, DigestMismatch, IsaNotUsable

BINARY = b"\x7fELF sample"


def test_the_binary_that_was_named_is_accepted() -> None:
    make_artifact(BINARY).check(BINARY, CPU.isa)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(DigestMismatch, match="nothing was loaded"):
        make_artifact(BINARY).check(BINARY + b"\0", CPU.isa)


def test_missing_features_are_named() -> None:
    needed = frozenset({IsaFeature.AVX512F, IsaFeature.AMX_TILE, IsaFeature.AVX512_VNNI})

    with pytest.raises(IsaNotUsable, match="needs amx_tile,avx512_vnni, which"):
        make_artifact(BINARY, required_isa=needed).check(BINARY, CPU.isa)


def test_another_abi_is_refused() -> None:
    with pytest.raises(AbiMismatch, match=f"version {ABI_VERSION + 1}"):
        make_artifact(BINARY, abi_version=ABI_VERSION + 1).check(BINARY, CPU.isa)
