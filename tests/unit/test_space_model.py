"""What the predicted time prefers."""

import pytest
from spaces import cpu

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.space.parts import largest_part


def test_model_counts_that_slices_of_k_are_added_up() -> None:
    problem, family = Problem.parse("f32 64x256x1024"), family_named("avx512_f32")

    columns, slices = (
        predict_cycles(
            problem,
            Candidate.parse(f"avx512_f32_4x64 mc64_nc256_kc512 jc_ic_jr_ir {grid}"),
            family,
            cpu("avx512"),
        )
        for grid in ("grid1x2", "grid1x1x2")
    )

    assert 1.005 * columns < slices < 1.05 * columns


def test_the_largest_part_is_as_kernels_cut_it() -> None:
    assert largest_part(512, 96, 2) == 288  # three whole panels; two and a third
    assert largest_part(100, 16, 2) == 52  # three tiles; the last three and a fourth of one
    assert largest_part(10, 16, 2) == 10
    assert largest_part(0, 16, 2) == 0


def test_model_knows_that_a_last_panel_may_be_narrow() -> None:
    problem, machine = Problem.parse("f32 16384x512x128"), cpu("avx512")
    family = family_named("avx512_f32")
    rows, columns = (
        predict_cycles(
            problem,
            Candidate.parse(f"avx512_f32_4x96 mc16384_nc576_kc128 jc_ic_jr_ir {grid}"),
            family,
            machine,
        )
        for grid in ("grid2x1", "grid1x2")
    )

    assert columns > 1.1 * rows


def _predicted_best(problem_text: str, widest: str) -> Candidate:
    """Return the first choice that the model takes for the fastest."""
    problem = Problem.parse(problem_text)
    space = Space(problem=problem, cpu=cpu(widest))

    def cycles(one: Candidate) -> float:
        return predict_cycles(problem, one, family_named(one.micro_kernel.family), space.cpu)

    return min(space.defaults(), key=cycles)


def test_model_prefers_wide_vectors_and_full_tiles() -> None:
    best = _predicted_best("f32 96x96x96", "avx512")

    assert best.micro_kernel.family == "avx512_f32"
    assert best.micro_kernel.mr * best.micro_kernel.nr >= 8 * 16


def test_model_prefers_to_read_streamed_weights_for_all_rows_at_once() -> None:
    best = _predicted_best("f32 8x4096x4096", "avx512")

    assert best.micro_kernel.mr == 8


@pytest.mark.parametrize("shape", ["512x3x512", "512x13x512", "512x24x512"])
def test_model_prefers_dot_products_to_vectors_with_idle_lanes(shape: str) -> None:
    best = _predicted_best(f"f32 {shape}", "avx512")

    assert best.micro_kernel.family == "avx512_f32_dot"


def test_model_prefers_amx_for_many_rows() -> None:
    best = _predicted_best("bf16 512x1024x1024", "amx")

    assert best.micro_kernel.text == "amx_bf16_32x32"
