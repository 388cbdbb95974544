"""Every row of the table of steps names what its C++ calls, and how libraries spell it."""

import math
import re

import numpy as np
import pytest

from gemm_tuner.domain.step_kind import StepKind
from gemm_tuner.domain.step_table import FUNCTION_PARTS, STEP_KINDS
from gemm_tuner.resources import templates_dir

KINDS = list(STEP_KINDS.values())
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
def test_a_row_names_what_its_cpp_calls_and_nothing_else(kind: StepKind) -> None:
    words = set(re.findall(r"\b[a-z_]\w*", kind.cpp))

    parameters = {name for name, _default in kind.parameters}
    assert words - parameters - {"value", "operand"} == {one.name for one in kind.functions}


@every_kind
def test_a_function_stands_in_its_part(kind: StepKind) -> None:
    for function in kind.called:
        assert function.part in FUNCTION_PARTS
        folder = templates_dir() / "parts"
        texts = [(templates_dir() / f"{function.part}.cpp.j2").read_text()]
        if "include" in texts[0]:
            texts = [path.read_text() for path in folder.glob(f"{function.part[6:]}_*.cpp.j2")]
        for text in texts:
            gives = text.partition(" · ")[0]
            assert re.search(rf"\b{function.name}\b", gives), function


@every_kind
def test_what_a_function_needs_stands_before_it(kind: StepKind) -> None:
    for function in kind.called:
        for needed in function.needs:
            assert FUNCTION_PARTS.index(needed.part) <= FUNCTION_PARTS.index(function.part)


# Offsets are arguments of a product, if anything; libraries round where they write bytes.
_UNSPELLED = {
    "onednn": {"x_zero_point", "x_row_zero_point"},
    "onnx": {"x_zero_point", "x_row_zero_point", "y_zero_point"},
    "torch": {"x_zero_point", "x_row_zero_point", "y_zero_point"},
}


@pytest.mark.parametrize("library", _UNSPELLED)
def test_libraries_refuse_no_other_steps(library: str) -> None:
    refused = {kind.name for kind in KINDS if getattr(kind, library) is None}

    assert refused == _UNSPELLED[library]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.whole_arrays], ids=lambda kind: kind.name
)
def test_whole_arrays_are_computed_as_by_the_reference(kind: StepKind) -> None:
    assert kind.whole_arrays is not None
    value = np.linspace(-12, 12, 2401).astype(np.float32)
    defaults = [default for _name, default in kind.parameters]

    exact = kind.reference(np, value.astype(np.float64), None, *defaults)

    assert kind.whole_arrays(np, value, None, *defaults) == pytest.approx(exact, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("value", [-50.0, -2.0, -1e-3, 0.0, 1e-3, 3.0, 40.0])
def test_elu_and_mish_are_what_their_names_say(value: float) -> None:
    given = np.array([value])
    softplus = math.log1p(math.exp(value))

    elu = STEP_KINDS["elu"].reference(np, given, None, 0.5)[0]
    mish = STEP_KINDS["mish"].reference(np, given, None)[0]

    assert elu == pytest.approx(value if value > 0 else 0.5 * math.expm1(value))
    assert mish == pytest.approx(value * math.tanh(softplus))


def test_an_error_before_elu_grows_with_its_slope() -> None:
    error = STEP_KINDS["elu"].error

    assert error(np, 1e-3, -1.0, None, 4.0) == pytest.approx(4e-3)
    assert error(np, 1e-3, -1.0, None, -0.5) == pytest.approx(1e-3)
