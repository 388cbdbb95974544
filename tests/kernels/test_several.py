"""Several kernels for a range of m in one library: proved as one, and called as one."""

import json
from dataclasses import replace

import numpy as np
import pytest
from grids import grid_toolchain
from needs import need_cpu
from numpy.typing import NDArray
from proof import Needs, Subject, prove_all

from gemm_tuner.abi import OK, ArrayView, make_args
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import allocate_aligned
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.limits import check_covers

PROBLEM = "f32 0..13x9x20 nk bias"
FEW, SOME, MANY = (
    "scalar_f32_2x4 mc2_nc12_kc10 jc_ic_jr_ir",
    "scalar_f32_2x4 mc6_nc4_kc10 ic_jc_ir_jr pack_x",
    "scalar_f32_2x4 mc14_nc12_kc10 jc_ic_jr_ir grid1x1x2",
)
SEVERAL = f"..1 {FEW} | ..6 {SOME} | {MANY}"


def _kernel(candidate: str, *, problem: str = PROBLEM) -> Kernel:
    asked, chosen = Problem.parse(problem), Candidate.parse(candidate)
    family = family_named(chosen.micro_kernel.family)
    build = compile_kernel(
        render(asked, chosen, family), isa=family.isa, toolchain=grid_toolchain(as_served=False)
    )
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


@pytest.mark.proof
def test_several_kernels_of_each_kind_are_right_together() -> None:
    subjects = [
        # In blocks and slices of k, with a workspace; one of them has two phases.
        Subject(problem=PROBLEM, candidate=SEVERAL),
        Subject(
            problem="f32 1..20x40x33 kn gelu_tanh",
            candidate="..4 avx2_f32_4x16 mc4_nc48_kc33 jc_ic_jr_ir pf4096 | "
            "avx2_f32_6x16 mc24_nc48_kc33 ic_jc_jr_ir pack_x",
        ),
        Subject(
            problem="int8 1..9x52x33 nk x_zero_point+bias+relu",
            candidate="..2 avx2_int8_2x32 mc2_nc64_kc34 jc_ic_jr_ir ws2 | "
            "avx2_int8_4x16 mc12_nc64_kc34 jc_ic_jr_ir pack_x",
        ),
        Subject(
            problem="bf16_s4 1..9x20x64 nk:g32 bias",
            candidate="..1 avx2_w4_1x16 mc1_nc32_kc64 jc_ic_jr_ir | "
            "avx2_w4_4x16 mc12_nc32_kc64 jc_ic_jr_ir",
        ),
    ]

    assert prove_all(subjects, grid_toolchain(as_served=False)) == {}


@pytest.mark.parametrize(
    "candidate",
    [
        "scalar_f32_3x4 mc12_nc12_kc10 jc_ic_jr_ir pack_x",
        "scalar_f32_4x4 mc8_nc4_kc20 ic_jc_ir_jr",
        "avx2_f32_6x16 mc24_nc16_kc20 jc_ic_jr_ir pf_next",
        "avx2_f32_13x8 mc39_nc16_kc10 ic_jc_jr_ir pack_x pf_next",
    ],
)
def test_a_row_has_the_same_bits_whatever_tiles_share_the_rows(candidate: str) -> None:
    need_cpu(family_named(Candidate.parse(candidate).micro_kernel.family).isa)
    kernel = _kernel(candidate, problem="f32 1..41x9x20 nk bias")
    random = np.random.default_rng(3)
    x, w = random.standard_normal((41, 20), np.float32), random.standard_normal((9, 20), np.float32)
    bias, packed = random.standard_normal(9, np.float32), kernel.pack(w)

    alone = np.concatenate([kernel(x[m : m + 1], packed, bias=bias) for m in range(41)])

    np.testing.assert_allclose(alone, x @ w.T + bias, rtol=1e-4, atol=1e-5)
    for m in range(1, 42):
        np.testing.assert_array_equal(kernel(x[:m], packed, bias=bias), alone[:m], strict=True)


@pytest.mark.parametrize("boundary", [2, 5])
def test_a_call_that_goes_to_the_kernel_beside_is_found(boundary: int) -> None:
    right = "args->m <= 1)" if boundary == 2 else "args->m <= 6)"

    def respell(source: Source, isa: frozenset[IsaFeature]) -> Needs:
        assert source.text.count(right) == 1
        return Source(text=source.text.replace(right, f"args->m <= {boundary})")), isa

    subject = Subject(problem=PROBLEM, candidate=SEVERAL)
    (wrong,) = prove_all([subject], grid_toolchain(as_served=False), respell=respell).values()

    assert wrong.outcome is Outcome.WRONG
    assert wrong.detail.startswith("gemm_tuner_run returned 1")


def test_it_is_called_as_one_and_says_what_it_holds() -> None:
    kernel, alone = _kernel(SEVERAL), _kernel(MANY, problem=PROBLEM.replace("0..13", "7..13"))
    random = np.random.default_rng(1)
    x, w = random.standard_normal((13, 20), np.float32), random.standard_normal((9, 20), np.float32)
    bias = random.standard_normal(9, np.float32)
    packed = kernel.pack(w)

    described = json.loads(kernel.native.describe())

    assert [(one["m"], one["candidate"]) for one in described["kernels"]] == [
        ("0..1", FEW),
        ("2..6", SOME),
        ("7..13", MANY),
    ]
    assert kernel.candidate.text == SEVERAL
    assert kernel.packed_format == alone.packed_format
    for rows in range(14):
        for threads in (1, 2, 3):
            y = kernel(x[:rows], packed, threads=threads, bias=bias)
            np.testing.assert_allclose(y, x[:rows] @ w.T + bias, rtol=1e-4, atol=1e-4)
    # The kernel of a range is the same code, so it makes the same bits.
    np.testing.assert_array_equal(kernel(x, packed, bias=bias), alone(x, packed, bias=bias))


def test_each_kernel_of_a_library_is_cut_as_it_was_tuned() -> None:
    kernel = _kernel(SEVERAL)
    random = np.random.default_rng(2)
    x, w = random.standard_normal((13, 20), np.float32), random.standard_normal((9, 20), np.float32)
    bias = random.standard_normal(9, np.float32)
    packed = kernel.pack(w)

    def first_part(rows: int, parts: int) -> NDArray[np.float32]:
        """Return y of which only the first of some parts was computed, in all phases."""
        y, memory = np.full((rows, 9), np.nan, np.float32), kernel.native.workspace_bytes(parts)
        workspace = allocate_aligned(memory)
        args = make_args(
            m=rows,
            x=ArrayView(x.ctypes.data, 20),
            packed_w=packed.memory.ctypes.data,
            y=ArrayView(y.ctypes.data, 9),
            operands=[ArrayView(bias.ctypes.data, 0)],
            workspace=workspace.ctypes.data,
        )
        for phase in range(kernel.native.phases):
            assert kernel.native.run(args, phase, 0, parts) == OK
            assert kernel.native.run(args, phase, parts, parts) != OK
        return y

    # The greatest m is tuned for two parts, the others for one.
    assert kernel.native.preferred_parts == 2
    for rows, parts, is_whole in ((1, 2, True), (6, 2, True), (6, 3, False), (13, 2, False)):
        right = x[:rows] @ w.T + bias
        assert np.allclose(first_part(rows, parts), right, rtol=1e-4, atol=1e-4) is is_whole


def test_one_kernel_for_all_is_compiled_once() -> None:
    problem, candidate = Problem.parse(PROBLEM), Candidate.parse(f"..1 {MANY} | {MANY}")

    text = render(problem, candidate, family_named("scalar_f32")).text

    assert text.count("\nnamespace up_to_") == 1
    assert _kernel(candidate.text).candidate == candidate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"..6 {FEW} | ..1 {SOME} | {MANY}", "are not one candidate"),
        (f"..13 {FEW} | {MANY}", "boundaries that m = 0..13 does not have"),
        (f"..1 {FEW.replace('_kc10', '_kc20')} | {MANY}", "packed in different ways"),
        (f"..1 {FEW.replace('scalar', 'avx2')} | {MANY}", "are not one candidate"),
        (f"..1 {FEW} || {MANY}", "is not understood"),
        (f"1 {FEW} | {MANY}", "is not understood"),
        (" | ".join([*(f"..{m} {FEW}" for m in range(9)), MANY]), "8 kernels at most"),
    ],
)
def test_what_is_not_one_candidate_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidCandidate) as refused:
        check_covers(Problem.parse(PROBLEM), Candidate.parse(text))
    assert said in str(refused.value)


def test_of_a_single_m_it_is_no_candidate() -> None:
    one_m = replace(Problem.parse(PROBLEM), m=Rows(low=4, high=4))
    with pytest.raises(InvalidCandidate):
        check_covers(one_m, Candidate.parse(SEVERAL))
