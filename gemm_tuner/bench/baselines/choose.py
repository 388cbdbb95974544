"""Choose a baseline that is installed and right."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.tolerance import Expected, find_error
from gemm_tuner.bench.verify import Case
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing, InvalidSetting

AUTO = "auto"

# A library may trade accuracy for speed in its own way, as long as it computes the same thing.
_FACTOR = 4.0
_TOLERANCE = 1e-4


def choose_baseline(
    choice: str,
    makers: dict[str, Callable[[], Baseline]],
    check: Callable[[Baseline], str | None],
) -> Baseline:
    """Return the baseline chosen by name, or with `auto` the first that is there and right.

    Args:
        choice: `auto` or a key of `makers`.
        makers: how each baseline is loaded, the best first.
        check: what is wrong with the results of a baseline, None if nothing is.

    Raises:
        InvalidSetting: the choice is not known.
        BaselineMissing: the chosen one, or every one, is missing or wrong.
    """
    if choice != AUTO and choice not in makers:
        raise InvalidSetting(
            f"baseline {choice!r} is not known; use one of: {', '.join((AUTO, *makers))}."
        )
    reasons = []
    for name in makers if choice == AUTO else [choice]:
        try:
            baseline = makers[name]()
            error = check(baseline)
        except BaselineMissing as missing:
            reasons.append(str(missing))
            continue
        if error is None:
            return baseline
        reasons.append(f"{baseline.text}: {error}.")
    raise BaselineMissing(f"no baseline can be used: {' '.join(reasons)} Choose another one.")


def find_baseline_error(baseline: Baseline, problem: Problem, case: Case) -> str | None:
    """Return in words where the result of a baseline is wrong, None if it is right."""
    workload = make_workload(problem, case.inputs, threads=1)
    callee = baseline.prepare(workload)
    weights = WeightCopies(callee, 1, seed=0)
    expected = case.expected
    if not baseline.fuses_epilogue:
        expected = compute_expected(replace(problem, epilogue=NO_EPILOGUE), case.inputs)
    bounds = _FACTOR * expected.bounds + _TOLERANCE * (1.0 + np.abs(expected.values))

    callee.sample(weights.struct, warm_up_calls=0, timed_calls=1)

    return find_error(Expected(values=expected.values, bounds=bounds), workload.y)
