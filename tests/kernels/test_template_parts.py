"""Each part of a kernel gives what its first line says, and needs no more than that."""

from collections import defaultdict
from functools import cache
from itertools import islice
from random import Random

import pytest
from random_candidates import draw_of_family
from template_parts import (
    all_parts,
    defined_in_file,
    defined_names,
    header,
    render_in_parts,
    used_names,
)

from gemm_tuner.space.catalog import CATALOG

# Functions that each type of elements has one of.
OVERLOADED = {"broadcast", "load", "store", "stream", "store_bytes", "to_float", "load_weights"}
# A type that one product gives and the one that it converts for gives again, the same.
REPEATED = {"Sums"}
# The types of the problem and the constants at the head of a kernel are there for every part.
HEAD = "gemm.cpp.j2"
# What random draws seldom have: a panel in registers, one row of bytes as pairs.
RARE = (
    ("f32 12x48x4 nk bias+add", "avx512_f32_6x16 mc6_nc48_kc4 jc_ic_jr_ir"),
    ("bf16_s8 1x64x256 nk:g128 none", "avx512_bf16_w8_1x64 mc1_nc64_kc256 jc_ic_jr_ir"),
)


@cache
def kernels() -> list[dict[str, str]]:
    """Return some kernels of each family, each as the texts of its parts."""
    drawn = [
        (subject.problem, subject.candidate)
        for family in CATALOG.values()
        for subject in islice(draw_of_family(Random(1), family), 8)
    ]
    found = []
    for problem, candidate in (*RARE, *drawn):
        texts: dict[str, str] = defaultdict(str)
        for name, text in render_in_parts(problem, candidate):
            texts[name] += "\n" + text
        found.append({name: text for name, text in texts.items() if name != HEAD})
    return found


@pytest.mark.parametrize("part", all_parts())
def test_a_part_defines_what_it_gives(part: str) -> None:
    gives, _needs = header(part)

    rendered = {name for texts in kernels() for name in defined_names(texts.get(part, ""))}
    assert set(gives) <= defined_in_file(part) | rendered


def test_nothing_is_given_twice_in_a_kernel() -> None:
    for texts in kernels():
        givers = defaultdict(list)
        for part in texts:
            if not part.startswith("abi/"):
                for name in set(header(part)[0]) & defined_names(texts[part]):
                    givers[name].append(part)

        assert {name for name, parts in givers.items() if len(parts) > 1} <= OVERLOADED | REPEATED


def test_what_a_part_uses_is_needed_by_it_and_given_by_another() -> None:
    for texts in kernels():
        defined = {part: defined_names(text) for part, text in texts.items()}
        for part, text in texts.items():
            is_exports = part.startswith("abi/")  # it uses what every kernel has
            needs = [] if is_exports else header(part)[1]
            others = {
                name: other
                for other in texts
                if other != part and not other.startswith("abi/")
                for name in defined[other]
            }
            for name in used_names(text, set(others)) - defined[part]:
                assert is_exports or name in needs, f"{part} does not say that it needs {name}"
                assert name in header(others[name])[0], f"{others[name]} gives {name} in silence"


@pytest.mark.parametrize("part", all_parts())
def test_what_a_part_needs_is_given_by_some_part(part: str) -> None:
    given = {name for other in all_parts() for name in header(other)[0]}

    assert set(header(part)[1]) <= given
