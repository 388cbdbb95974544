"""The family with AVX512-FP16, on a CPU that has it or on an emulated one."""

import ctypes
import random
from collections.abc import Callable
from fractions import Fraction
from typing import cast

import numpy as np
import pytest
from needs import need_compiler, need_instruction
from proof import Subject, prove_all

from gemm_tuner.bench.emulator import build_emulator
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import TERMS_IN_F16
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import IsaNotUsable
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import family_named

FAMILY = family_named("avx512_fp16")
IN_F16 = 2 * TERMS_IN_F16  # steps of k
INSTRUCTION = Source(text='extern "C" void f() { asm("vfmadd231ph %zmm2, %zmm1, %zmm0"); }\n')

HAS_FP16 = IsaFeature.AVX512_FP16 in detect_cpu().isa
pytestmark = pytest.mark.isa(*(FAMILY.isa - {IsaFeature.AVX512_FP16}))


@pytest.fixture(scope="module", params=["gcc", "clang", "zig"])
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    toolchain = need_compiler(request.param)
    need_instruction(INSTRUCTION, FAMILY.isa, toolchain, "AVX512-FP16")
    return toolchain


def subject(
    problem: str,
    *,
    y: str = "f16",
    tile: str = "2x32",
    order: str = "jc_ic_jr_ir",
    extras: str = "",
) -> Subject:
    """Return a problem with a candidate with small blocks, of k a little more than sums in f16."""
    mr, nr = (int(number) for number in tile.split("x"))
    k = Problem.parse(f"f16 {problem}").k
    kc = min(IN_F16 + 2, max(2, k + k % 2))
    return Subject(
        problem=f"f16_f16_f16_{y} {problem}",
        candidate=f"{FAMILY.name}_{tile} mc{2 * mr}_nc{2 * nr}_kc{kc} {order}{extras}",
    )


def test_a_kernel_with_every_compiler_is_right(
    toolchain: Toolchain,
) -> None:
    subjects = [
        subject("5x35x37 nk bias+gelu_erf+add"),
        subject(f"3x17x{3 * IN_F16 + 1} kn relu", y="f32", extras=" pack_x u2"),
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.proof
def test_tails_of_n_and_k_for_any_m_are_right() -> None:
    tails_of_n = [subject(f"0..5x{n}x19 nk bias") for n in (0, 1, 15, 16, 17, 31, 32, 33, 63, 66)]
    depths = (0, 1, 2, 3, IN_F16 - 1, IN_F16, IN_F16 + 1, IN_F16 + 2, 2 * IN_F16 + 1)
    tails_of_k = [subject(f"0..5x33x{k} nk bias", y=y) for k in depths for y in ("f16", "f32")]

    wrong = prove_all([*tails_of_n, *tails_of_k], find_toolchain())

    assert not wrong


@pytest.mark.proof
def test_tiles_loop_orders_and_extras_are_right() -> None:
    subjects = [
        subject("15x66x131 kn add", tile="14x32", order="ic_jc_ir_jr", extras=" u4 grid2x1"),
        subject("9x49x131 nk scale", tile="8x48", order="ic_jc_jr_ir", extras=" pf4096 u2"),
        subject("30x17x5 nk silu", tile="29x16", order="jc_ic_ir_jr", y="f32", extras=" pack_x"),
        subject("4x129x300 kn mul", tile="3x128", extras=" pack_x pf8192 u2 grid1x2"),
        subject("2x100x1001 nk bias+tanh", tile="1x48", y="f32"),
        subject("5x40x600 nk bias+gelu_erf", extras=" grid1x1x2"),
    ]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong


def test_a_kernel_is_refused_where_the_cpu_lacks_the_feature() -> None:
    if HAS_FP16:
        pytest.skip("this CPU has AVX512-FP16")
    chosen = subject("5x35x37 nk none")
    source = render(Problem.parse(chosen.problem), Candidate.parse(chosen.candidate), FAMILY)
    build = compile_kernel(source, isa=FAMILY.isa, toolchain=find_toolchain())

    with pytest.raises(IsaNotUsable, match="avx512_fp16"):
        load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def _multiply_add() -> Callable[[int, int, int], int]:
    """Return the emulator's a * b + sum; all are bits of float16."""
    function = ctypes.CDLL(str(build_emulator(find_toolchain()))).emulator_half_multiply_add
    function.argtypes = (ctypes.c_uint16,) * 3
    function.restype = ctypes.c_uint16
    return cast(Callable[[int, int, int], int], function)


def _rounded(exact: Fraction) -> np.float16:
    """Return the nearest float16, ties to even."""
    magnitude = abs(exact)
    if magnitude >= 65520:
        return np.float16(np.inf if exact > 0 else -np.inf)
    unit = Fraction(1, 1 << 24)
    while magnitude >= 2048 * unit:
        unit *= 2
    return np.float16(float(round(exact / unit) * unit))


def test_emulated_products_are_added_with_one_rounding() -> None:
    multiply_add = _multiply_add()
    generator = random.Random(20_260)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = numbers[np.isfinite(numbers)]
    near_one = numbers[0x3BF0:0x3C10]
    for _case in range(10_000):
        a = generator.choice(finite)
        b = generator.choice(generator.choice((finite, near_one)))
        total = generator.choice((generator.choice(finite), -a))

        bits = multiply_add(*(int(number.view(np.uint16)) for number in (a, b, total)))

        expected = _rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(total)))
        assert np.uint16(bits).view(np.float16) == expected, (a, b, total)


@pytest.mark.parametrize(
    ("a", "b", "total", "expected"),
    [
        (np.inf, 2.0, 1.0, np.inf),
        (np.inf, 0.0, 1.0, np.nan),
        (np.inf, 1.0, -np.inf, np.nan),
        (np.nan, 0.0, 0.0, np.nan),
        (65504.0, 2.0, 0.0, np.inf),
    ],
)
def test_emulated_infinity_and_nan(a: float, b: float, total: float, expected: float) -> None:
    multiply_add = _multiply_add()
    bits = (int(np.float16(number).view(np.uint16)) for number in (a, b, total))

    result = np.uint16(multiply_add(*bits)).view(np.float16)

    np.testing.assert_equal(float(result), expected)


def test_a_wrong_sum_in_f16_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = subject("5x35x300 nk none")
    monkeypatch.setattr("proof.render", _render_without_the_odd_steps)

    wrong = prove_all([chosen], find_toolchain())

    assert wrong[chosen].outcome is Outcome.WRONG


def _render_without_the_odd_steps(*args: object) -> Source:
    text = render(*args).text  # type: ignore[arg-type]  # handed on
    changed = text.replace("partial >> 16", "partial & 0")
    assert changed != text
    return Source(text=changed)
