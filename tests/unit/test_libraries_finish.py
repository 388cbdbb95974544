"""The pass in C after a product: each step of it computes what its reference says."""

import ctypes
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.epilogue import STEP_KINDS, Epilogue, OperandShape, Step, StepKind
from gemm_tuner.domain.spelling import PassOperation
from gemm_tuner.libraries.finish import Finish, has_operation, load_finish, operations_of
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.resources import library_native_dir

KINDS = list(STEP_KINDS.values())
ELEMENTWISE = [kind for kind in KINDS if kind.operand is OperandShape.NONE]
# Near zero, the error function of the pass is exact to 1.5e-7 of x, not of the result.
ABSOLUTE = {"gelu_erf": 1e-5}
EXTREMES = (0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan)


@cache
def _library() -> ctypes.CDLL:
    return load_finish(build_drivers(find_toolchain(), detect_cpu()).finish)


def _finished(step: Step, values: NDArray[np.float32]) -> NDArray[np.float32]:
    sums = values.reshape(1, -1)
    y: NDArray[np.float32] = np.empty_like(sums)
    Finish(operations_of([step], []), sums, y).run(_library())
    return y.reshape(-1)


def _exact(step: Step, values: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        exact = step.kind.reference(np, values.astype(np.float64), None, *step.parameters)
    return np.asarray(exact, np.float64)


def _step(text: str) -> Step:
    (step,) = Epilogue.parse(text).steps
    return step


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_names_its_operation_or_why_it_has_none(kind: StepKind) -> None:
    assert (kind.after_product is None) == bool(kind.left_to_numpy)


def test_operations_have_the_numbers_of_the_source() -> None:
    source = (library_native_dir() / "finish.c").read_text()
    names = re.search(r"enum \{\n    (ADD,[^}]*)\}", source)
    assert names is not None

    assert re.findall(r"\w+", names[1]) == [one.name for one in sorted(PassOperation)]


def test_a_step_without_an_operation_is_not_for_the_pass() -> None:
    step = _step("elu")
    kind = replace(step.kind, after_product=None, left_to_numpy="it is new")

    assert has_operation(step)
    assert not has_operation(replace(step, kind=kind))


@pytest.mark.parametrize("text", [kind.name for kind in ELEMENTWISE] + ["elu:-0.5", "elu:3"])
def test_a_step_is_as_exact_as_its_row_says(text: str) -> None:
    step = _step(text)
    near_zero = np.geomspace(1e-30, 1.0, 2001)
    values = np.concatenate(
        [np.linspace(-120, 120, 48001), near_zero, -near_zero, np.linspace(-2, 2, 8001)]
    ).astype(np.float32)

    finished, exact = _finished(step, values), _exact(step, values)

    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    bound = max(1.0, step.kind.ulp) * ulp + ABSOLUTE.get(step.kind.name, step.kind.absolute)
    wrong = np.abs(finished - exact) > bound
    assert not wrong.any(), (values[wrong][:5], finished[wrong][:5], exact[wrong][:5])


@pytest.mark.parametrize("text", [kind.name for kind in ELEMENTWISE] + ["elu:-0.5"])
def test_extremes_of_a_step_are_those_of_its_reference(text: str) -> None:
    step = _step(text)
    values = np.array(EXTREMES, np.float32)

    finished = _finished(step, values)

    with np.errstate(over="ignore"):
        exact = _exact(step, values).astype(np.float32)
    assert finished == pytest.approx(exact, rel=1e-5, abs=1e-35, nan_ok=True)
