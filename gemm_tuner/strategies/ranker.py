"""A learned ranker: randomized trees as JSON, evaluated without the library that made them."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import read_bounded
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.features import FEATURES, features
from gemm_tuner.user_file import make_folder_of, user_file

_MAX_FILE_BYTES = 1 << 26
_DEEPEST = 256  # those of a set of 72 recordings are up to 40 deep, and each level takes its time

# Sums of these are finite, and places are integers of NumPy.
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Place = Annotated[int, Field(ge=-2, lt=10_000)]
Nodes = Annotated[tuple[Place, ...], Field(min_length=1, max_length=10_000)]
Figures = Annotated[tuple[Number, ...], Field(min_length=1, max_length=10_000)]


class _Model(BaseModel):
    """The parent of both models: strict, closed and finite."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Tree(_Model):
    """A tree of decisions; node 0 is its root.

    Node i asks whether feature `feature[i]` is at most `threshold[i]`, and leads to `left[i]` if so
    and to `right[i]` if not. A leaf, whose `left` is -1, has the `value`.
    """

    feature: Nodes
    threshold: Figures
    left: Nodes
    right: Nodes
    value: Figures

    @model_validator(mode="after")
    def _check(self) -> Self:
        count = len(self.value)
        if {len(one) for one in (self.feature, self.threshold, self.left, self.right)} != {count}:
            raise ValueError("a tree has as many features, thresholds, branches and values.")
        depths = [0] * count
        for node, (feature, left, right) in enumerate(
            zip(self.feature, self.left, self.right, strict=True)
        ):
            if left == -1:
                continue
            is_branch = node < left < count and node < right < count
            if not (is_branch and 0 <= feature < len(FEATURES)):
                raise ValueError(f"node {node} leads nowhere.")
            depth = depths[node] + 1
            if depth > _DEEPEST:
                raise ValueError(f"node {node} has more than {_DEEPEST} questions above it.")
            depths[left], depths[right] = max(depth, depths[left]), max(depth, depths[right])
        return self

    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the value of the leaf that each row comes to."""
        feature, threshold, left, right, value = self._arrays
        node = np.zeros(len(rows), np.int64)
        while (inner := np.flatnonzero(left[node] != -1)).size:
            at = node[inner]
            goes_left = rows[inner, feature[at]].astype(np.float64) <= threshold[at]
            node[inner] = np.where(goes_left, left[at], right[at])
        values: NDArray[np.float64] = value[node]
        return values

    @cached_property
    def _arrays(self) -> tuple[NDArray[Any], ...]:
        fields = (self.feature, self.threshold, self.left, self.right, self.value)
        return tuple(np.array(one) for one in fields)


class Ranker(_Model):
    """Trees whose mean predicts the logarithm of a candidate's time over that of the best.

    Training caps that logarithm: what is far from the best is told apart from it, not ordered.
    """

    format: Literal[2] = 2
    features: tuple[str, ...]
    trees: Annotated[tuple[Tree, ...], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.features != FEATURES:
            raise ValueError("the ranker was trained on other features.")
        return self

    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the prediction for each row of features."""
        total = np.zeros(len(rows))
        for tree in self.trees:
            total += tree.predict(rows)
        return total / len(self.trees)

    def costs(self, space: Space, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        """Return what is predicted of some candidates of a space, less is better."""
        if not candidates:
            return {}
        predicted = self.predict(features(space, candidates)).tolist()
        return dict(zip(candidates, predicted, strict=True))


def own_ranker_path() -> Path:
    """Return where the ranker of this user is, if one was trained."""
    return user_data_path("gemm-tuner") / "ranker.json"


def write_ranker(path: Path, ranker: Ranker) -> None:
    """Write a ranker to a file; its folder is made if there is none.

    Raises:
        InvalidSetting: it cannot be written.
    """
    make_folder_of(path)
    with user_file(path) as file:
        file.write(ranker.model_dump_json().encode())


def read_ranker(path: Path) -> Ranker:
    """Return the ranker in a file.

    Raises:
        InvalidSetting: the file cannot be read, or holds none.
    """
    remedy = 'make one by "gemm-tuner model train", or name another file with --ranker.'
    try:
        return Ranker.model_validate_json(read_bounded(path, _MAX_FILE_BYTES))
    except OSError as error:
        raise InvalidSetting(
            f"there is no ranker in {path}: {error.strerror or error}; {remedy}"
        ) from None
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
        where = ".".join(map(str, first["loc"])) or "ranker"
        raise InvalidSetting(f"{path} is no ranker: {where}: {first['msg']}; {remedy}") from None
