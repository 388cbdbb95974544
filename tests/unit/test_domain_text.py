"""Every text form parses back to what it was made of, and bad text is refused by name."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemm_tuner.domain.blocking import Blocking, LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.comparison import is_as_fast
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.doubt import why_disturbed
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import STEP_KINDS, Epilogue, Step
from gemm_tuner.domain.measurement import Measurement, Ratio, Timing, of_several_processes
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Decision, decide
from gemm_tuner.domain.weight_layout import GROUP_SIZES, WeightLayout
from gemm_tuner.errors import (
    InvalidCandidate,
    InvalidEpilogue,
    InvalidInput,
    InvalidProblem,
    InvalidRecord,
    InvalidSetting,
)
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.verdicts.deriving import layer_id

sizes = st.integers(min_value=0, max_value=5000)
counts = st.integers(min_value=1, max_value=5000)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    name = draw(st.sampled_from(sorted(STEP_KINDS)))
    if name == "clamp":
        low = draw(st.floats(allow_nan=False, allow_infinity=False, width=32))
        high = draw(st.floats(low, allow_nan=False, allow_infinity=False, width=32))
        return Step(kind=STEP_KINDS[name], parameters=(low, high))
    if name in {"leaky_relu", "elu"}:
        return Step(kind=STEP_KINDS[name], parameters=(draw(st.floats(-1, 1)),))
    return Step.parse(name)


TYPES = [
    "f32",
    "bf16",
    "bf16_bf16_f32_f32",
    "f16",
    "f16_f16_f16_f16",
    "u8_s8_s32_f32",
    "s8_s8_s32_s8",
    "u8_s8_s32_s32",
    "f32_u8",
    "bf16_s4",
]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    low = draw(sizes)
    is_fixed = draw(st.booleans())
    types = OperandTypes.parse(draw(st.sampled_from(TYPES)))
    chain = draw(st.lists(steps(), max_size=4))
    offsets = [step for step in chain if step.kind.is_offset]
    others = [step for step in chain if not step.kind.is_offset]
    k = draw(sizes)
    column = max(1, k)
    groups = [size for size in (*GROUP_SIZES, column) if size <= column]
    return Problem(
        m=Rows(low=low, high=draw(st.one_of(st.just(low), st.integers(low, low + 100)))),
        n=draw(sizes),
        k=k,
        types=types,
        w_group=draw(st.sampled_from(groups)) if types.is_weight_only else None,
        w_layout=draw(st.sampled_from(WeightLayout)),
        epilogue=Epilogue(
            steps=(
                *(offsets if types.accumulator is DType.S32 else ()),
                *(others if types.y is not DType.S32 else ()),
            )
        ),
        reduction=Reduction.FIXED
        if is_fixed
        and types.accumulator is not DType.F16
        and (types.w.is_signed or not types.is_weight_only)
        else Reduction.ANY,
        operation=Operation.LINEAR
        if types.is_weight_only
        else draw(st.sampled_from([Operation.LINEAR, Operation.MATMUL])),
    )


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    prefetch_w_bytes = draw(sizes)
    return Candidate(
        micro_kernel=MicroKernel(family="avx512_f32", mr=draw(counts), nr=draw(counts)),
        blocking=Blocking(
            mc=draw(counts),
            nc=draw(counts),
            kc=draw(counts),
            loop_order=draw(st.sampled_from(LoopOrder)),
            pack_x=draw(st.booleans()),
            convert_once=draw(st.booleans()),
            prefetch_w_bytes=prefetch_w_bytes,
            prefetch_next_panel=prefetch_w_bytes == 0 and draw(st.booleans()),
            w_streams=draw(counts),
            shuffle_x=draw(st.booleans()),
            stream_y=draw(st.booleans()),
            k_unroll=draw(counts),
            grid_m=draw(counts),
            grid_n=draw(counts),
            grid_k=draw(counts),
        ),
    )


@given(problem=problems())
def test_problem_text_parses_back(problem: Problem) -> None:
    assert Problem.parse(problem.text) == problem


@given(
    problem=problems(),
    other=problems(),
    name=st.sampled_from([each.name for each in fields(Problem)]),
)
def test_no_two_problems_share_a_key(problem: Problem, other: Problem, name: str) -> None:
    try:
        near = replace(problem, **{name: getattr(other, name)})
    except InvalidInput:  # these types do not go with those steps
        near = other

    assert near == problem or problem_id(near) != problem_id(problem)


@given(candidate=candidates())
def test_candidate_text_parses_back(candidate: Candidate) -> None:
    assert Candidate.parse(candidate.text) == candidate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f32 1x2x3 nk x_zero_point", "off integers"),
        ("int8 1x2x3 nk bias+x_zero_point", "zero points of x first"),
        ("u8_s8_s32_s32 1x2x3 nk x_zero_point+scale", "y is s32"),
    ],
)
def test_steps_that_do_not_go_with_the_types_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidEpilogue, match=message):
        Problem.parse(text)


def test_problem_text_may_leave_out_layout_and_epilogue() -> None:
    assert Problem.parse("f32 1x2x3").text == "f32 1x2x3 nk none"


def test_groups_of_weights_are_part_of_the_layout() -> None:
    problem = Problem.parse("bf16_u4 1x64x200 kn:g128 bias")

    assert problem.text == "bf16_u4_f32_bf16 1x64x200 kn:g128 bias"
    assert (problem.w_group, problem.w_groups) == (128, 2)
    # Half a byte for each element, and a float and a byte for each group of each column.
    assert problem.w_bytes == 64 * 200 // 2 + 64 * 2 * 5


def test_no_group_is_longer_than_a_column() -> None:
    whole = Problem.parse("f32_s8 1x64x100 nk:gk")

    assert Problem.parse("f32_s8 1x64x100 nk:g128") == whole
    assert whole.w_groups == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("s8 1x2x3", "does not say the types"),
        ("f32_s32_f32_f32 1x2x3", "do not go together"),
        ("u8_s4_s32_f32 1x2x3", "do not go together"),
        ("f32_s8_f32_s8 1x2x3 nk:g32", "do not go together"),
        ("f32_s8_f32_f32 1x2x3", "need groups"),
        ("f32 1x2x3 nk:g32", "need groups"),
        ("f32_s8 1x2x99 nk:g33", "groups of 33"),
        ("f32_s8 1x2x99 nk:g0", "groups of 0"),
        ("f32_s8 1x2x99 nk:32", "'nk:32'"),
        ("f32_s8 1x2x99 nk:g", "'nk:g'"),
        ("u8_s8_f32_f32 1x2x3", "do not go together"),
        ("f32 -1x2x3", "m = '-1'|m = -1"),
        ("f32 1..x2x3", "is not understood"),
        ("f32 4x-2x3", "n = -2"),
        ("f32 1x2x1000000000000", "k = 1000000000000"),
        ("f32 2000000000x2000000000x1", "split the problem"),
        ("f99 1x2x3", "'f99'"),
        ("f32_f32 1x2x3", "f32_f32"),
        ("f32 5..2x2x3", "empty range"),
        ("f32 1x2x3 mn none", "'mn'"),
        ("f32 1x2", "not understood"),
        (f"f32 {'9' * 5000}x1x1", "not understood"),
        (f"f32 1x{'9' * 5000}x1", "not understood"),
        (f"f32 1x1x{'9' * 5000}", "not understood"),
        (f"f32_s8 1x2x99 nk:g{'9' * 5000}", "is not known"),
        ("", "not understood"),
    ],
)
def test_bad_problem_is_refused_with_its_value(text: str, named: str) -> None:
    with pytest.raises(InvalidProblem, match=named):
        Problem.parse(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gellu", "'gellu'"),
        ("bias++relu", "''"),
        ("relu:1", "takes: none"),
        ("clamp:1", "takes: low, high"),
        ("clamp:2:1", "low must not be above high"),
        ("clamp:a:b", "not a number"),
        ("clamp:nan:1", "finite"),
        ("clamp:0:1e39", "finite numbers in float32"),
        ("leaky_relu:7", "slope must be between"),
        ("+".join(["bias"] * 17), "17 steps"),
    ],
)
def test_bad_epilogue_is_refused_with_its_value(text: str, named: str) -> None:
    with pytest.raises(InvalidEpilogue, match=named):
        Epilogue.parse(text)


def test_repeated_operands_are_numbered() -> None:
    epilogue = Epilogue.parse("add+relu+add+bias+add")

    assert [operand.name for operand in epilogue.operands] == ["add", "add_2", "bias", "add_3"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "avx512_f32",
        f"avx512_f32_8x48 mc{'9' * 5000}_nc48_kc1 jc_ic_jr_ir",
        f"avx512_f32_{'9' * 5000}x48 mc8_nc48_kc1 jc_ic_jr_ir",
        "avx512_f32_8x48 mc0_nc48_kc1 jc_ic_jr_ir",
        "a_0x1 mc1_nc1_kc1 jc_ic_jr_ir",
    ],
)
def test_bad_candidate_is_refused(text: str) -> None:
    with pytest.raises(InvalidCandidate):
        Candidate.parse(text)


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_bad_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(InvalidSetting, match=str(threads)):
        ExecutionContext(threads=threads)


def test_regime_choice() -> None:
    assert Regime.parse_choice("both") == (Regime.HOT, Regime.COLD_WEIGHTS)
    with pytest.raises(InvalidSetting, match="'warm'"):
        Regime.parse_choice("warm")


def test_ratio_pairs_samples_and_scales_by_calls() -> None:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=10, samples_ns=(100, 110, 100, 120, 100)),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=5, samples_ns=(100, 110, 100, 120, 90)),
    )

    assert measurement.ratio == Ratio(median=2.0, low=1.8, high=2.0, of_minimums=1.8)


def test_interval_of_a_median_drops_outer_samples() -> None:
    # For 21 samples the 95 % interval of the median is from the 6th to the 16th.
    timing = Timing(calls_per_sample=1, samples_ns=tuple(range(101, 122)))
    even = Timing(calls_per_sample=1, samples_ns=(1,) * 21)

    ratio = Measurement(candidate=even, baseline="b", baseline_timing=timing).ratio

    assert (ratio.low, ratio.median, ratio.high) == (106, 111, 116)


def _in_one_process(*samples_ns: int) -> Measurement:
    """Return a measurement beside a baseline of 1000 ns in each round."""
    return Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=samples_ns),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(1000,) * len(samples_ns)),
    )


def test_of_several_processes_the_interval_covers_each() -> None:
    fast, middle, slow = (_in_one_process(*(ns,) * 12) for ns in (500, 800, 1250))

    place, (measured,) = of_several_processes([[slow], [fast], [middle]])

    assert place == 2
    assert measured.candidate == middle.candidate
    assert len(measured.processes) == 3
    assert measured.ratio == Ratio(median=1.25, low=0.8, high=2.0, of_minimums=0.8)


def test_a_kernel_that_is_slower_in_one_process_is_not_called_tuned() -> None:
    of_one, of_other = _in_one_process(*(806,) * 31), _in_one_process(*(1075,) * 31)
    assert decide(of_one.ratio) is Decision.TUNED  # 1.24 times

    _place, (together,) = of_several_processes([[of_one], [of_other]])  # and 0.93

    assert decide(together.ratio) is Decision.TIE
    assert not is_as_fast(together.ratio)
    _place, (alike,) = of_several_processes([[of_one], [of_one]])
    assert decide(alike.ratio) is Decision.TUNED


def test_a_process_in_which_medians_and_minimums_disagree_is_reason_to_doubt() -> None:
    calm = _in_one_process(*(800,) * 12)
    restless = _in_one_process(500, *(800,) * 11)

    assert why_disturbed(calm) is None
    # The median of one and the fastest sample of another would seem to agree.
    _place, (doubtful,) = of_several_processes([[calm], [restless]])
    _place, (sure,) = of_several_processes([[calm], [_in_one_process(*(500,) * 12)]])
    assert why_disturbed(doubtful) is not None
    assert why_disturbed(sure) is None


def test_samples_must_pair_up() -> None:
    one = Timing(calls_per_sample=1, samples_ns=(1,))
    two = Timing(calls_per_sample=1, samples_ns=(1, 2))
    with pytest.raises(InvalidRecord, match="pair up"):
        Measurement(candidate=one, baseline="b", baseline_timing=two)


@pytest.mark.parametrize(
    ("ratio", "decision"),
    [
        (Ratio(median=1.10, low=1.05, high=1.20, of_minimums=1.1), Decision.TUNED),
        (Ratio(median=1.10, low=1.01, high=1.20, of_minimums=1.1), Decision.TIE),
        (Ratio(median=1.10, low=1.05, high=1.20, of_minimums=1.0), Decision.TIE),
        (Ratio(median=0.99, low=0.97, high=1.01, of_minimums=1.0), Decision.TIE),
        (Ratio(median=0.90, low=0.88, high=0.95, of_minimums=0.9), Decision.BASELINE),
    ],
)
def test_decision_needs_the_whole_interval(ratio: Ratio, decision: Decision) -> None:
    assert decide(ratio) is decision


@pytest.mark.parametrize("types", ["f16_f16_f16_f16", "f16_f16_f16_f32", "f32_u8", "bf16_u4"])
def test_types_without_a_fixed_order_are_refused(types: str) -> None:
    groups = ":g32" if OperandTypes.parse(types).is_weight_only else ""

    with pytest.raises(InvalidProblem, match="use f32, bf16 or f16 added up in f32, bytes"):
        Problem.parse(f"{types} 1x64x64 nk{groups} none fixed")


def test_a_step_that_nothing_defines_to_the_bit_is_refused() -> None:
    kind = replace(STEP_KINDS["relu"], after_product=None, left_to_numpy="it is new")
    epilogue = Epilogue(steps=(Step(kind=kind),))
    problem = replace(Problem.parse("f32 1x2x3"), epilogue=epilogue)

    with pytest.raises(InvalidEpilogue, match="steps relu are not defined to the bit"):
        replace(problem, reduction=Reduction.FIXED)


def test_a_fixed_order_is_the_last_word_of_a_text() -> None:
    problem = Problem.create(8, 32, 16, epilogue="bias", reduction="fixed")

    assert problem.text == "f32 8x32x16 nk bias fixed"
    assert problem.layer_text == "f32 *x32x16 nk bias fixed"
    assert Problem.parse("f32 8x32x16 fixed").text == "f32 8x32x16 nk none fixed"
    assert Problem.create(8, 32, 16, reduction="any") == Problem.parse("f32 8x32x16")
    with pytest.raises(InvalidProblem, match="reduction 'fast' is not known"):
        Problem.create(8, 32, 16, reduction="fast")
    with pytest.raises(InvalidProblem, match="weight layout 'fixed'"):
        Problem.parse("f32 8x32x16 fixed nk")


def test_keys_of_problems_for_any_order_are_what_they_were() -> None:
    problem = Problem.parse("f32 8x32x16 nk bias")

    assert problem_id(problem) == identity("f32 8x32x16 nk bias")
    words = (32, 16, "f32", "nk", "bias")
    assert layer_id(problem) == identity(words)
    assert layer_id(replace(problem, reduction=Reduction.FIXED)) != layer_id(problem)


def test_the_first_word_of_a_text_names_the_operation() -> None:
    problem = Problem.create(128, 128, 64, epilogue="scale", operation="matmul")

    assert problem.text == "matmul f32 128x128x64 nk scale"
    assert problem.layer_text == "matmul f32 *x128x64 nk scale"
    assert layer_id(problem) != layer_id(replace(problem, operation=Operation.LINEAR))
    assert Problem.parse("linear f32 8x32x16").text == "f32 8x32x16 nk none"
    with pytest.raises(InvalidProblem, match="operation 'conv' is not known"):
        Problem.create(8, 32, 16, operation="conv")
    with pytest.raises(InvalidProblem, match="known in the call alone; use f32, bf16, f16"):
        Problem.parse("matmul bf16_s4 1x64x64 nk:g32")
