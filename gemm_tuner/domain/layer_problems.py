"""The problems of a layer for several m, whose kernels are to share packed weights."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.errors import InvalidSetting

MAX_LOSS = 0.02
MOST_PROBLEMS = 16


def layer_problems(
    n: int,
    k: int,
    *,
    m: Iterable[int | str],
    dtype: str,
    epilogue: str,
    w_layout: str,
    reduction: str = Reduction.ANY.value,
    max_loss: float,
) -> tuple[Problem, ...]:
    """Return the problems of a layer for several m, each once, that are to share weights.

    Raises:
        InvalidInput: an argument cannot be used.
    """
    if isinstance(m, str):
        raise InvalidSetting(f"m is {m!r}; give a list, [{m!r}].")
    problems = [
        Problem.create(
            rows, n, k, dtype=dtype, w_layout=w_layout, epilogue=epilogue, reduction=reduction
        )
        for rows in m
    ]
    check_sharing(problems, max_loss)
    for problem in problems:
        problem.check_work()
    return tuple(dict.fromkeys(problems))


def check_sharing(problems: Sequence[Problem], max_loss: float) -> None:
    """Check that the problems differ in m alone, and the loss that is allowed.

    Raises:
        InvalidSetting: they do not, or are too many, or the loss is not a share.
    """
    if not 0 <= max_loss < 1:
        raise InvalidSetting(f"loss {max_loss} is not a share; use one from 0 to 1, such as 0.02.")
    if not all(problem.operation.packs_ahead for problem in problems):
        raise InvalidSetting(
            "products of two activations have no weights to share; tune a range of m instead, with "
            "--split-range if need be."
        )
    if not 1 <= len(problems) <= MOST_PROBLEMS:
        raise InvalidSetting(
            f"{len(problems)} values of m cannot share weights; give 1 to {MOST_PROBLEMS}, "
            "and ranges such as 17..64 in the place of several."
        )
    if len({replace(problem, m=problems[0].m) for problem in problems}) > 1:
        raise InvalidSetting(
            "problems that share packed weights differ in m alone, but these do in more: "
            f"{', '.join(problem.text for problem in problems)}."
        )
