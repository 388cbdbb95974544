"""Every axis is a row, and what other modules know of axes follows from the rows."""

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from gemm_tuner.domain.blocking import WORDS, Blocking
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axes import AXES
from gemm_tuner.space.axis import Axis
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.tile import Tile
from gemm_tuner.space.walk import every_choice, settled, tried_first

FIELDS = [field.name for field in fields(Blocking)]
PLACES = (
    ("f32 256x4096x4096", "zen4", 2),
    ("f32 1x4096x4096", "zen4", 1),
    ("bf16 16x4096x4096", "sapphire_rapids", 4),
    ("f16 128x768x768", "zen4", 1),
    ("f32_s8 4x64x512 nk:g128", "zen4", 1),
    ("attention f32 100x300x64 scale+causal", "zen3", 2),
)


def some_tiles() -> list[Tile]:
    """Return every 23rd tile of some spaces."""
    spaces = [
        Space(problem=Problem.parse(text), cpu=core_named(core).cpu, threads=threads)
        for text, core, threads in PLACES
    ]
    return [tile for space in spaces for tile in list(space.tiles())[::23]]


class Watched(Choice):
    """A choice that notes which of its fields are read."""

    read: set[str] = set()  # noqa: RUF012 - one for all copies

    def __getattribute__(self, name: str) -> object:
        if name in FIELDS:
            Watched.read.add(name)
        return super().__getattribute__(name)


def test_every_field_has_one_word_and_one_axis() -> None:
    assert [field for word in WORDS for field in word.fields] == sorted(
        FIELDS, key=lambda field: (field not in {"mc", "nc", "kc"}, FIELDS.index(field))
    )
    assert sorted(field for axis in AXES for field in axis.fields) == sorted(FIELDS)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.fields[0])
def test_values_depend_on_no_fields_but_those_that_an_axis_reads(axis: Axis) -> None:
    for tile in some_tiles():
        choice = tried_first(tile)
        watched = Watched.of(choice.blocking, choice.cut)
        Watched.read.clear()

        for value in axis.choices(tile, watched):
            if axis.refusal:
                axis.refusal(tile.problem, tile.family, tile.micro_kernel, watched)
            assert value is not None

        assert Watched.read <= {*axis.fields, *axis.reads}


def test_what_is_settled_stays() -> None:
    for tile in some_tiles():
        once = settled(tile, tried_first(tile))

        assert settled(tile, once) == once


def test_what_a_person_may_not_type_is_not_in_the_space() -> None:
    problem = Problem.parse("f16 40x64x600 nk")
    space = Space(problem=problem, cpu=core_named("zen3").cpu, threads=2)

    for tile in list(space.tiles())[::11]:
        for choice in every_choice(tile):
            refused = [
                axis.refused(problem, tile.family, tile.micro_kernel, choice.blocking)
                for axis in AXES
            ]
            assert not any(refused)


def test_complexity_is_the_number_of_words_beside_blocks_and_order() -> None:
    plain = Candidate.parse("avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir")
    busy = Candidate.parse(f"{plain.text} pack_x pf4096 u4 grid1x2")

    assert (plain.complexity, busy.complexity) == (0, 4)
    assert replace(busy, blocking=plain.blocking) == plain


def words_of(axis: Axis) -> str:
    """Return the words that say the fields of an axis, N in the place of numbers."""
    said = {
        word.write(["N"] * len(word.fields)) if field != "loop_order" else "jc_ic_jr_ir": None
        for field in axis.fields
        for word in WORDS
        if field in word.fields
    }
    return ", ".join(f"`{word}`" for word in said)


def row_of(axis: Axis) -> str:
    """Return what the file of an axis opens with, as a row of a table."""
    text = sys.modules[axis.choices.__module__].__doc__
    assert text
    what, *values, first = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    first = first.removeprefix("Tried first: ")
    return f"| {words_of(axis)} | {what} | {' '.join(values)} | {first[0].upper()}{first[1:]} |"


def test_the_page_has_what_the_files_of_the_axes_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "search.md"
    table = "\n".join(
        (
            "| Words | What it decides | Worth trying | First |",
            "|---|---|---|---|",
            *(row_of(axis) for axis in AXES),
        )
    )

    assert table in page.read_text("utf-8"), f"docs/search.md needs this table:\n{table}"
