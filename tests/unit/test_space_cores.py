from dataclasses import replace

import pytest

from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.cores import CORES, Core, core_named, core_of
from gemm_tuner.space.ranking import shortlist

# What each family of the catalog multiplies with, in the widest vectors, needs one of these.
_PRODUCTS = {IsaFeature.AVX512_BF16: "pairs", IsaFeature.AVX512_VNNI: "quads"}


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_a_row_is_of_one_piece(core: Core) -> None:
    isa, rates = core.cpu.isa, core.rates

    assert core_of(core.cpu) is core
    assert rates.vector_bits == (512 if IsaFeature.AVX512F in isa else 256)
    assert rates.l2_bytes > rates.l3_bytes > rates.memory_bytes > 0
    assert core.cpu.caches.l1d_bytes < core.cpu.caches.l2_bytes < core.cpu.caches.l3_bytes
    for feature, name in _PRODUCTS.items():
        if feature in isa:
            assert getattr(rates, name) > 0
    assert core.source


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
def test_what_cores_share_is_less_than_all_of_them_could_use(core: Core) -> None:
    shared, rates, clock_ghz = core.shared, core.rates, core.clock_hz / 1e9
    cores = core.cpu.physical_cores

    assert cores % shared.group_cores == 0
    # Rounded to 10 GB/s: L3 has a slice for each core.
    assert shared.l3_gb_s == pytest.approx(shared.group_cores * rates.l3_bytes * clock_ghz, abs=10)
    assert rates.memory_bytes * clock_ghz <= shared.group_gb_s <= shared.socket_gb_s
    assert shared.socket_gb_s < cores * rates.memory_bytes * clock_ghz
    assert 0 < shared.group_ns <= shared.socket_ns
    assert (shared.link_gb_s == 0) == (shared.link_ns == 0)
    assert shared.link_ns == 0 or shared.link_ns > shared.socket_ns
    assert core.shared_source


def test_a_core_is_shared_by_models_but_not_by_vendors() -> None:
    zen5 = CORES["zen5"].cpu

    assert core_of(replace(zen5, model=0x44)) is CORES["zen5"]
    assert core_of(replace(zen5, vendor="GenuineIntel")) is not CORES["zen5"]


@pytest.mark.parametrize(
    ("vendor", "isa", "name"),
    [
        ("GenuineIntel", "sapphire_rapids", "sapphire_rapids"),
        ("AuthenticAMD", "zen4", "zen5"),
        ("AuthenticAMD", "zen2", "zen3"),
        ("GenuineIntel", "sierra_forest", "alder_lake"),
    ],
)
def test_an_unknown_cpu_counts_as_one_with_its_vectors(vendor: str, isa: str, name: str) -> None:
    unknown = replace(CORES[isa].cpu, vendor=vendor, family=99)

    assert core_of(unknown) is CORES[name]


def test_an_unknown_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidSetting, match="'pentium' is not known; use one of: cascade_lake"):
        core_named("pentium")


def first_family(cpu: Cpu, text: str) -> str:
    space = Space(problem=Problem.parse(text), cpu=cpu)
    return shortlist(space, 1)[0].micro_kernel.family


@pytest.mark.parametrize(
    ("target", "text", "family"),
    [
        ("sapphire_rapids", "bf16 128x768x768 nk none", "amx_bf16"),
        ("sapphire_rapids", "u8_s8_s32_f32 1024x1024x1024 nk none", "amx_int8"),
        ("granite_rapids", "f16 128x768x768 nk none", "amx_fp16"),
        ("zen4", "bf16 128x768x768 nk none", "avx512_bf16"),
        ("cascade_lake", "u8_s8_s32_f32 128x768x768 nk none", "avx512_int8"),
        ("sierra_forest", "u8_s8_s32_f32 128x768x768 nk none", "avx_vnni_int8"),
        ("zen2", "f32 128x768x768 nk none", "avx2_f32"),
    ],
)
def test_the_model_ranks_first_what_a_core_is_made_for(target: str, text: str, family: str) -> None:
    assert first_family(core_named(target).cpu, text) == family
