"""Some kernels of every family, each told apart into the parts that it was made of."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from random import Random

from proof import Subject
from random_candidates import draw_of_family
from template_parts import render_in_parts

from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import CATALOG, family_named

# What random draws seldom have: a panel in registers, one row of bytes as pairs.
_RARE = (
    ("avx512_f32", "f32 12x48x4 nk bias+add", "avx512_f32_6x16 mc6_nc48_kc4 jc_ic_jr_ir"),
    (
        "avx2_f32",
        "attention f32 4x40x20 scale+add+causal",
        "avx2_f32_4x16 mc4_nc16_kc20 ic_jc_jr_ir pack_w",
    ),
    (
        "avx512_bf16_w8",
        "bf16_s8 1x64x256 nk:g128 none",
        "avx512_bf16_w8_1x64 mc1_nc64_kc256 jc_ic_jr_ir",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInParts:
    """A rendered kernel: the text of each of its parts, by the name of the part."""

    family: MicroKernelFamily
    parts: dict[str, str]


@cache
def kernels() -> list[KernelInParts]:
    """Return some kernels of each family."""
    drawn = [
        (name, subject.problem, subject.candidate)
        for name, family in CATALOG.items()
        for subject in islice(_with_one_product(draw_of_family(Random(1), family)), 8)
    ]
    found = []
    for name, problem, candidate in (*_RARE, *drawn):
        parts: dict[str, str] = defaultdict(str)
        for part, text in render_in_parts(problem, candidate):
            parts[part] += "\n" + text
        # The types and the constants at the head of a kernel are there for every part.
        own = {part: text for part, text in parts.items() if "/" in part}
        found.append(KernelInParts(family=family_named(name), parts=own))
    return found


def _with_one_product(subjects: Iterator[Subject]) -> Iterator[Subject]:
    """Yield those that are no attention, whose two products have names in namespaces of their own.

    One that has few names twice is among the rare ones.
    """
    return (one for one in subjects if not Problem.parse(one.problem).operation.has_values)
