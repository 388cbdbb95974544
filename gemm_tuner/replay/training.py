"""Train a ranker on candidates whose speeds are known, by scikit-learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from gemm_tuner.derive import tells_speed
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.replay.recording import Recording
from gemm_tuner.replay.samples import Samples
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.store.repository import Repository
from gemm_tuner.strategies.features import FEATURES, features
from gemm_tuner.strategies.ranker import Ranker, Tree

_LEAST_OF_A_PROBLEM = 8  # candidates: fewer say little of an order
_LEAST_PROBLEMS = 2
_MOST_LEAVES = 4_000  # of a tree: a file of a hundred is read in a second or two
_LEAST_LOGARITHM = -0.15  # what has 0.86 of the speed of the best need not be told from slower ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A problem in a context, with the speeds of some of its candidates, greater is better."""

    space: Space
    speeds: Mapping[Candidate, float]


def examples_of(recordings: Sequence[Recording]) -> list[Example]:
    """Return what recordings teach."""
    return [
        Example(space=RecordedSpace.of(one), speeds=Samples(one).speeds()) for one in recordings
    ]


def examples_in(repository: Repository, cpu: Cpu) -> list[Example]:
    """Return what the timings of a CPU in a store teach, those of the newest generator of each."""
    groups: dict[tuple[Problem, ExecutionContext], list[Trial]] = {}
    for trial in repository.trials(cpu_key=cpu.exact_key, origin=None):
        candidate = trial.candidate
        is_one_kernel = candidate.micro_kernel.family in CATALOG and not candidate.below
        if is_one_kernel and tells_speed(trial):
            groups.setdefault((trial.problem, trial.context), []).append(trial)
    return [
        Example(
            space=Space(problem=problem, cpu=cpu, threads=context.threads, regime=context.regime),
            speeds={
                one.candidate: one.measurement.comparable_speed
                for one in trials
                if one.measurement and one.generator == trials[-1].generator
            },
        )
        for (problem, context), trials in groups.items()
    ]


def has_trainer() -> bool:
    """Return whether scikit-learn is installed."""
    try:
        import sklearn.ensemble  # noqa: F401, PLC0415 - optional, and slow to load
    except ImportError:
        return False
    return True


def check_trainable(recordings: Sequence[Recording]) -> None:
    """Check that a ranker can be trained for each problem on all others.

    Raises:
        InvalidSetting: the problems are too few.
        MissingCapability: scikit-learn is not installed.
    """
    taught = {
        one.problem
        for one in recordings
        if sum(tried.outcome is Outcome.CORRECT for tried in one.candidates) >= _LEAST_OF_A_PROBLEM
    }
    if len(taught) < _LEAST_PROBLEMS:
        raise InvalidSetting(
            "a ranker for a problem is trained on others; record at least "
            f"{_LEAST_PROBLEMS} problems, each with {_LEAST_OF_A_PROBLEM} candidates that are "
            "right, or name a ranker with --ranker."
        )
    _check_trainer()


def _check_trainer() -> None:
    if not has_trainer():
        raise MissingCapability(
            "a ranker is trained by scikit-learn, which is not installed; run "
            '"pip install gemm-tuner[model]".'
        )


def train(examples: Sequence[Example]) -> Ranker:
    """Return a ranker that was trained on examples.

    Raises:
        MissingCapability: scikit-learn is not installed.
        InvalidSetting: the examples are too few.
    """
    rows, targets = _table(examples)
    model = fitted(rows, targets)
    return exported(model)


def _table(examples: Sequence[Example]) -> tuple[Any, Any]:
    rows, targets = [], []
    for one in examples:
        if len(one.speeds) >= _LEAST_OF_A_PROBLEM:
            best = max(one.speeds.values())
            rows.append(features(one.space, one.speeds))
            relative = np.log([speed / best for speed in one.speeds.values()])
            targets.append(-np.maximum(relative, _LEAST_LOGARITHM))
    if not rows:
        raise InvalidSetting(
            f"there is no problem with {_LEAST_OF_A_PROBLEM} timed candidates to learn from; run "
            '"gemm-tuner model record" first, or name another file or --db.'
        )
    return np.concatenate(rows), np.concatenate(targets)


def fitted(rows: Any, targets: Any) -> Any:  # noqa: ANN401 - scikit-learn has no types
    """Return extremely randomized trees, fitted to rows of features and their targets.

    Geurts, Ernst, Wehenkel, "Extremely randomized trees", Machine Learning 63, 2006.

    Raises:
        MissingCapability: scikit-learn is not installed.
    """
    _check_trainer()
    from sklearn.ensemble import ExtraTreesRegressor  # noqa: PLC0415 - optional

    model = ExtraTreesRegressor(
        n_estimators=100,
        min_samples_leaf=max(2, ceil(len(rows) / _MOST_LEAVES)),
        max_features=0.5,
        random_state=0,
    )
    return model.fit(rows, targets)


def exported(model: Any) -> Ranker:  # noqa: ANN401 - scikit-learn has no types
    """Return the trees of a fitted model; they predict what it does."""
    return Ranker(
        features=FEATURES,
        trees=tuple(
            Tree(
                feature=tuple(tree.feature.tolist()),
                threshold=tuple(tree.threshold.tolist()),
                left=tuple(tree.children_left.tolist()),
                right=tuple(tree.children_right.tolist()),
                value=tuple(tree.value[:, 0, 0].tolist()),
            )
            for tree in (estimator.tree_ for estimator in model.estimators_)
        ),
    )
