"""Kernels that convert f16 are those of bfloat16 but for reading and writing elements.

Those of bfloat16 are proved in full; of those of f16, this is the proof of the rest.
"""

from itertools import product

import pytest
from rows import LIKE_BF16, ROWS, candidate_text, small_tile, usable

from gemm_tuner.codegen.render import render
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import family_named

EXTRAS = (
    "",
    " pack_x",
    " pf4096",
    " pack_x pf_next u2",
    " u4 grid2x1",
    " grid1x1x2",
    " pf_next ws2",
)


def parts_of_source(problem: str, candidate: str) -> tuple[str, str]:
    """Return what stands before and after the functions that convert elements, names aside."""
    chosen = Candidate.parse(candidate)
    source = render(Problem.parse(problem), chosen, family_named(chosen.micro_kernel.family))
    _header, text = source.text.split("\nnamespace\n", 1)
    before, text = text.split("\n// IEEE 754" if problem.startswith("f16") else "\n// bfloat16", 1)
    _reads, text = text.split("\n// Write ", 1)
    _writes, text = text.split("\n}\n", 1)
    after, _interface = text.split("gemm_tuner_describe", 1)
    return before.replace("Bf16", "F16"), after.replace("Bf16", "F16")


@pytest.mark.parametrize("name", LIKE_BF16)
def test_a_kernel_that_converts_f16_is_one_of_bfloat16(name: str) -> None:
    row = next(row for row in ROWS if row.family.name == name and row.types.text == "f16")
    mr, nr = small_tile(row.family)
    ways = [
        *product(("nk", "kn"), LoopOrder, EXTRAS, ("bias",)),
        *product(("nk",), (LoopOrder.JC_IC_JR_IR,), ("",), STEP_KINDS),
    ]

    for turn, (layout, order, extras, epilogue) in enumerate(ways):
        m, k = ("0..9", f"{4 * mr + 1}", "1")[turn % 3], 16 + turn
        tile = (2, 4 * row.family.lanes) if "ws" in extras else (mr, nr)
        rest = f"{m}x{2 * nr + 3}x{k} {layout} {usable(epilogue, row.types)}"
        candidate = candidate_text(row, k, order=order, extras=extras, tile=tile)

        ours = parts_of_source(f"f16 {rest}", candidate)
        theirs = parts_of_source(f"bf16 {rest}", candidate.replace(name, LIKE_BF16[name]))

        assert ours == theirs, candidate
