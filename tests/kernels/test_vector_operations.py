"""Vectors supply the operations of their instruction set, and no other template knows of one."""

import re
from pathlib import Path

import pytest
from kernels_in_parts import kernels

from gemm_tuner.codegen.environment import environment
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.vectors import Vectors, VectorsCan
from gemm_tuner.resources import templates_dir
from gemm_tuner.space.catalog import CATALOG

VECTORS = sorted({family.vectors for family in CATALOG.values()}, key=lambda one: one.name)
every_vectors = pytest.mark.parametrize("vectors", VECTORS, ids=lambda one: one.name)

OF_ALL = {
    "define_bounds",
    "define_greater",
    "define_nearest_even",
    "define_reciprocal",
    "define_stream_row",
    "saturate",
}
OF_SEVERAL_LANES = {
    "add_product",
    "load_whole",
    "multiply_quads",
    "to_integers",
    "widen_bytes",
}
OF_THOSE_THAT_CAN = {
    VectorsCan.LOOK_UP: {"look_up", "look_up_in_two", "look_up_words"},
    VectorsCan.PICK_QUARTERS: {"load_quarters", "pick_in_quarters"},
    VectorsCan.MIX_BITS: {"mask_and_flip"},
    VectorsCan.FILL_LINES: {"fence"},
    VectorsCan.MULTIPLY_PAIRS: {"multiply_pairs", "multiply_halves"},
}
# For products that stand in one kind of vectors.
OF_ONE = {
    "avx2": {"broadcast_after", "load_after", "multiply_words", "widen_to_words"},
    "avx512": {"masked_load_of_bytes", "masked_load_of_words"},
}

_INSTRUCTION = re.compile(
    r"""\basm(?:\ volatile)?\(\s*"\s*(?!")[^"]+  # inline assembly that is not empty
    |__builtin_ia32_\w+|\b_mm\d*_\w+             # intrinsics
    |"[=+&]*[vxy]"\(                              # registers of one instruction set
    |\b[xyz]mm\d*\b
    |\b(?:avx|sse|fma|f16c|vnni|amx_)\w*          # instruction sets
    |\blanes\ [<=>]=?\ (?:4|8|16)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Tile registers are AMX, whatever the vectors are.
_OF_TILES = re.compile(r'asm volatile\("(?:tile|ldtilecfg|tdp)')


def expected_operations(vectors: Vectors) -> set[str]:
    """Return the names of all operations that vectors supply, as their row says."""
    wide = set() if vectors.are_scalars else OF_SEVERAL_LANES
    by_capability = (OF_THOSE_THAT_CAN[one] for one in vectors.can)
    return OF_ALL | wide | OF_ONE.get(vectors.name, set()).union(*by_capability)


def other_parts() -> list[str]:
    """Return the names of all templates but those of vectors."""
    root = templates_dir()
    names = (path.relative_to(root).as_posix() for path in root.rglob("*.j2"))
    return sorted(name for name in names if not name.startswith("vectors/"))


def instructions_in(part: str) -> list[str]:
    """Return what names an instruction set in a template."""
    return _INSTRUCTION.findall((templates_dir() / part).read_text())


def test_every_folder_of_vectors_has_a_row() -> None:
    folders = {path.name for path in (templates_dir() / "vectors").iterdir()}

    assert {vectors.name for vectors in VECTORS} == folders


@every_vectors
def test_vectors_supply_every_operation_of_their_row(vectors: Vectors) -> None:
    template = environment().get_template(f"vectors/{vectors.name}/operations.j2")

    operations = vars(template.make_module({"register": vectors.constraint}))
    supplied = {name for name in operations if not name.startswith("_")}

    assert supplied == expected_operations(vectors)


@every_vectors
def test_vectors_read_and_write_the_types_of_their_families(vectors: Vectors) -> None:
    folder = templates_dir() / "vectors" / vectors.name
    families = [family for family in CATALOG.values() if family.vectors.name == vectors.name]
    combinations = {types for family in families for types in family.types}

    used = {dtype for types in combinations for dtype in (types.x, types.accumulator, types.y)}
    elements = {"integers" if one.is_integer else one.value for one in used - {DType.F32}}
    assert {path.name for path in folder.iterdir()} == {
        "operations.j2",
        "vector.cpp.j2",
        *(f"{name}.cpp.j2" for name in elements),
    }


@every_vectors
def test_every_operation_is_in_the_documents(vectors: Vectors) -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()

    named = set(re.findall(r"`(\w+)`", text)) | {"masked_load_of_bytes", "masked_load_of_words"}
    assert expected_operations(vectors) <= named


def test_every_operation_is_used() -> None:
    used = {
        name
        for part in other_parts()
        for name in re.findall(r"\bvectors\.(\w+)", (templates_dir() / part).read_text())
    }

    assert set[str]().union(*map(expected_operations, VECTORS)) <= used


@pytest.mark.parametrize("part", other_parts())
def test_no_other_template_names_an_instruction_set(part: str) -> None:
    named = [found for found in instructions_in(part) if not _OF_TILES.match(found)]

    assert not named, f"{part}: {named[0]}; let the vectors supply it"


def test_tile_instructions_are_in_kernels_that_need_them() -> None:
    with_tiles = {part for part in other_parts() if instructions_in(part)}

    needs = {one.family.isa for one in kernels() if with_tiles & one.parts.keys()}

    assert with_tiles
    assert all(IsaFeature.AMX_TILE in isa for isa in needs)


def test_kernels_for_any_cpu_hold_no_instruction() -> None:
    scalar = [one for one in kernels() if one.family.vectors.are_scalars]

    assert len(scalar) > len(CATALOG) // 8
    for kernel in scalar:
        for part, text in kernel.parts.items():
            assert not _INSTRUCTION.search(text), part
