"""Attention as a problem: its text, what is refused, and its result in float64."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from gemm_tuner.abi import ArgsStruct
from gemm_tuner.bench.baselines.choose import baseline_rows, raced_packages
from gemm_tuner.bench.inputs import InputKind, Inputs, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidEpilogue, InvalidProblem
from gemm_tuner.store.verdicts.deriving import layer_id

FULL = Problem.parse("attention f32 5x7x4 scale+add+causal")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("attention f32 128x512x64", "attention f32 128x512x64 none"),
        ("attention f32 1..4x512x64 nk scale+add", "attention f32 1..4x512x64 scale+add"),
        ("attention f32 8x512x256 causal", "attention f32 8x512x256 causal"),
        ("attention bf16 8x512x64 scale", "attention bf16 8x512x64 scale"),
        ("attention f16 8x512x64 scale", "attention f16 8x512x64 scale"),
        ("attention f32 1x1..4096x64 nk scale", "attention f32 1x1..4096x64 scale"),
        ("attention f32 1..8x0..512x64 causal", "attention f32 1..8x0..512x64 causal"),
        ("attention f32 1x512..512x64 scale", "attention f32 1x512x64 scale"),
    ],
)
def test_a_text_parses_back(text: str, canonical: str) -> None:
    problem = Problem.parse(text)

    assert problem.text == canonical
    assert Problem.parse(canonical) == problem
    assert problem.operation is Operation.ATTENTION
    assert problem.layer_text == canonical.replace(problem.m.text, "*", 1)


def test_a_range_of_keys_is_another_layer() -> None:
    problem = Problem.parse("attention f32 1..4x1..512x64 scale")

    assert (problem.least_n, problem.n) == (1, 512)
    assert problem.layer_text == "attention f32 *x1..512x64 scale"
    assert problem.with_columns(7).text == "attention f32 1..4x7x64 scale"
    assert problem.flop(1) == problem.with_columns(512).flop(1)
    assert layer_id(problem) != layer_id(problem.with_columns(512))


def test_sizes_follow_from_the_operation() -> None:
    assert FULL.w_shape == (7, 4)
    assert FULL.y_columns == 4
    assert FULL.flop(5) == 2 * 2 * 4 * (3 + 4 + 5 + 6 + 7)
    assert replace(FULL, n=2).flop(5) == 2 * 2 * 4 * (1 + 2)
    assert Problem.parse("attention f32 5x7x4").flop(5) == 2 * 2 * 4 * 5 * 7
    assert FULL.scores.text == "matmul f32 5x7x4 nk scale+add"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("attention f32 4x4x257 scale", "heads of 257 elements"),
        ("attention f32 4x4x0 scale", "heads of 0 elements"),
        ("attention int8 4x4x4 scale", "do not go together"),
        ("attention bf16_bf16_f32_f32 4x4x4", "not computed in the types"),
        ("attention f32 4x4x4 kn scale", "keys as .n, k."),
        ("attention f32 4x4x4 kn", "keys as .n, k."),
        ("attention f32 4x4x64 nk:g32 scale", "f32 with the weight layout .nk:g32"),
        ("attention f32 4x4x4 scale fixed", "no fixed order"),
        ("f32 4x1..4x4", "n = 1..4 is a range"),
        ("matmul f32 1x1..64x64 nk", "n = 1..64 is a range, which the operation 'attention' alone"),
        ("attention f32 4x5..4x4", "n = 5..4 is an empty range"),
        ("attention f32 4x-1..4x4", "n = -1 is out of range"),
        (
            "attention f32 1000000x1000000x4",
            "product of queries and keys of .* 4000000000000 bytes",
        ),
        ("attention f32 8x8", "write it as 'attention f32 128x512x64 scale.causal', whose"),
    ],
)
def test_what_attention_does_not_have_is_refused(text: str, what: str) -> None:
    with pytest.raises(InvalidProblem, match=what):
        Problem.parse(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("attention f32 4x4x4 relu", "not those of scores"),
        ("attention f32 4x4x4 causal+scale", "in this order"),
        ("attention f32 4x4x4 scale+scale", "once at most"),
        ("matmul f32 4x4x4 nk causal", "hides scores of attention"),
        ("f32 4x4x4 nk bias+causal", "hides scores of attention"),
    ],
)
def test_steps_that_scores_do_not_have_are_refused(text: str, what: str) -> None:
    with pytest.raises(InvalidEpilogue, match=what):
        Problem.parse(text)


def test_what_versions_before_do_not_give_comes_last() -> None:
    names = [field[0] for field in ArgsStruct._fields_]

    assert names[names.index("v") :] == [
        "v",
        "v_leading_dimension",
        "v_batch_stride",
        "v_head_stride",
        "n",
    ]


def test_libraries_of_attention_race_for_attention_alone() -> None:
    names = {row.name for row in baseline_rows() if row.computes(Operation.ATTENTION)}
    of_layers = {row.name for row in baseline_rows() if row.computes(Operation.LINEAR)}

    assert {"onednn-attention", "openblas-attention", "torch-attention"} <= names
    assert "openblas" not in names
    assert not any("attention" in name for name in of_layers)
    assert set(raced_packages(inf, attends=True)) >= {f"numpy {np.__version__}"}
    assert len(set(raced_packages(inf))) == len(raced_packages(inf))


def by_hand(problem: Problem, inputs: Inputs) -> np.ndarray:
    """Return attention, one row after the other."""
    assert inputs.v is not None
    rows = []
    for i, q in enumerate(inputs.x.astype(np.float64)):
        scores = inputs.w.astype(np.float64) @ q * inputs.operands["scale"][0]
        scores += inputs.operands["add"][i]
        seen = np.arange(problem.n) <= i + problem.n - problem.m.high
        scores, v = scores[seen], inputs.v.astype(np.float64)[seen]
        if np.all(np.isneginf(scores)):
            rows.append(np.zeros(problem.k))
            continue
        weights = np.exp(scores - scores.max())
        rows.append(weights @ v / weights.sum())
    return np.array(rows)


def test_the_reference_is_softmax_of_the_scores_times_v() -> None:
    inputs = make_inputs(FULL, InputKind.NORMAL, seed=1)
    inputs.operands["add"][2] = -np.inf
    inputs.operands["add"][3, ::2] = -np.inf

    expected = compute_expected(FULL, inputs)

    right = by_hand(FULL, inputs)
    np.testing.assert_allclose(expected.values, right, rtol=1e-9, atol=1e-12)
    assert expected.values[2].tolist() == [0.0] * 4
    assert expected.bounds[2].tolist() == [0.0] * 4
    assert 0 < expected.bounds[4].max() < 1e-4


def test_a_nan_reaches_the_rows_that_see_it_and_an_infinite_score_makes_one() -> None:
    inputs = make_inputs(FULL, InputKind.NORMAL, seed=2)
    inputs.w[6] = np.nan  # the last key, which the last query alone sees
    inputs.x[0, 0] = np.inf

    expected = compute_expected(FULL, inputs)

    assert np.isnan(expected.values).all(axis=1).tolist() == [True, False, False, False, True]


def test_products_of_a_batch_differ_where_their_arrays_do() -> None:
    inputs = make_inputs(FULL, InputKind.NORMAL, seed=3)
    expected = compute_expected(FULL, inputs)

    products = inputs.of_products(FULL, 6)
    right = expected.of_products(FULL, 6)

    for item in range(6):
        one = slice(5 * item, 5 * item + 5)
        keys = slice(7 * item, 7 * item + 7)
        assert products.v is not None
        alone = replace(inputs, x=products.x[one], w=products.w[keys], v=products.v[keys])
        np.testing.assert_allclose(
            right.values[one], compute_expected(FULL, alone).values, rtol=1e-9, atol=1e-12
        )
