"""Choose a baseline that is installed and right."""

from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBaseline:
    """A baseline that is right.

    `call_s` is the time of one call of it, not warmed up. `note` says why better ones were skipped;
    it is empty if none was.
    """

    baseline: Baseline
    call_s: float
    note: str


def choose_baseline(
    choice: str,
    makers: dict[str, Callable[[], Baseline]],
    check: Callable[[Baseline], float | str],
) -> CheckedBaseline:
    """Return the baseline chosen by name, or with `auto` the first that is there and right.

    Args:
        choice: `auto` or a key of `makers`.
        makers: how each baseline is loaded, the best first.
        check: what is wrong with the results of a baseline, or how long it took if nothing is.

    Raises:
        InvalidSetting: the choice is not known.
        BaselineMissing: the chosen one, or every one, is missing or wrong.
    """
    if choice != AUTO and choice not in makers:
        raise InvalidSetting(
            f"baseline {choice!r} is not known; use one of: {', '.join((AUTO, *makers))}."
        )
    reasons: dict[str, str] = {}
    for name in makers if choice == AUTO else [choice]:
        try:
            baseline = makers[name]()
            checked = check(baseline)
        except BaselineMissing as missing:
            reasons[name] = str(missing)
            continue
        if isinstance(checked, float):
            skipped = (f"{skipped} was skipped: {reason}" for skipped, reason in reasons.items())
            return CheckedBaseline(baseline=baseline, call_s=checked, note=" ".join(skipped))
        reasons[name] = f"{baseline.text}: {checked}."
    raise BaselineMissing(
        f"no baseline can be used: {' '.join(reasons.values())} Choose another one."
    )


def check_baseline(baseline: Baseline, problem: Problem, case: Case) -> float | str:
    """Return the time of one call in seconds, or in words where its result is wrong."""
    workload = make_workload(problem, case.inputs, threads=1)
    callee = baseline.prepare(workload)
    weights = WeightCopies(callee, 1, seed=0)
    expected = case.expected
    if not baseline.fuses_epilogue:
        expected = compute_expected(replace(problem, epilogue=NO_EPILOGUE), case.inputs)
    bounds = _FACTOR * expected.bounds + _TOLERANCE * (1.0 + np.abs(expected.values))

    sample = callee.sample(weights.struct, warm_up_calls=0, timed_calls=1)

    error = find_error(Expected(values=expected.values, bounds=bounds), workload.y)
    return sample.elapsed_ns / 1e9 if error is None else error
