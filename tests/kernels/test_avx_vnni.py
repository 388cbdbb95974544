"""Kernels for AVX-VNNI with every combination of types, in the encoding that this CPU has."""

import pytest
from needs import each
from proof import Subject, prove_all

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.space.catalog import CATALOG

FAMILIES = [one for one in CATALOG.values() if IsaFeature.AVX_VNNI in one.isa]


@pytest.mark.proof
@pytest.mark.parametrize("family", each(FAMILIES))
def test_every_combination_of_types_is_right(family: MicroKernelFamily) -> None:
    is_grouped = family.layout is PackedLayout.GROUPS
    subjects = [
        Subject(
            problem=f"{types.text} 0..{2 * mr + 1}x{nr + 3}x{k} {layout}{words} none",
            candidate=f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc{k} jc_ic_jr_ir",
        )
        for number, types in enumerate(sorted(family.types, key=lambda one: one.text))
        for mr, nr in (family.tiles[number * 7 % len(family.tiles)],)
        for k, layout in ((72 + 4 * (number % 3), ("nk", "kn")[number % 2]),)
        for words in (":g32" if is_grouped else "",)
    ]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong
