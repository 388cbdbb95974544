"""Kernels that are proved together: each is found out by itself."""

import pytest
from proof import Needs, Subject, prove_all

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source

RIGHT, BAD, LAST = (
    Subject(
        problem=f"f32 0..5x5x{k} nk bias",
        candidate="scalar_f32_2x4 mc4_nc8_kc16 jc_ic_jr_ir",
    )
    for k in (7, 8, 9)
)
CHECK = "    if (args->size_bytes"


@pytest.mark.parametrize(
    ("instead", "outcome"),
    [
        ("return GEMM_TUNER_OK;", Outcome.WRONG),
        ("static_cast<volatile float *>(args->y)[-1] = 0;", Outcome.OUT_OF_BOUNDS),
        ("__builtin_trap();", Outcome.CRASHED),
        ("this is not C++", Outcome.COMPILE_FAILED),
    ],
)
def test_a_bad_kernel_among_right_ones_is_found(instead: str, outcome: Outcome) -> None:
    def respell(source: Source, isa: frozenset[IsaFeature]) -> Needs:
        assert CHECK in source.text
        is_bad = BAD.problem in source.text
        text = source.text.replace(CHECK, f"    {instead}\n{CHECK}") if is_bad else source.text
        return Source(text=text), isa

    wrong = prove_all([RIGHT, BAD, LAST], find_toolchain(), respell=respell)

    assert {subject: finding.outcome for subject, finding in wrong.items()} == {BAD: outcome}
