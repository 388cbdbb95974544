"""What is told of a quantised model beside the one it was made of."""

from math import inf
from typing import Any

import pytest

from gemm_tuner.errors import InvalidSetting

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")


def test_errors_and_first_classes_are_counted_over_all_inputs() -> None:
    def rounded(x: Any) -> Any:  # noqa: ANN401 - a tensor
        return {"y": x.round()}

    found = gt.compare(
        lambda x: {"y": x},
        rounded,
        [torch.tensor([[0.25, 1.0], [3.0, -4.0]]), torch.tensor([[2.5, 1.0, 2.75]])],
        classes=-1,
    )
    # 2.5 becomes 2, and 2.75 becomes 3
    assert (found.largest_error, found.mean_error, found.largest) == (0.5, 1 / 7, 4.0)
    assert found.top1 == 1.0
    assert str(found) == (
        "largest error 0.5, mean error 0.143, of outputs up to 4; the same class first in 100.00%"
    )
    other = gt.compare(lambda x: x, lambda x: -x, torch.tensor([[1.0, 2.0], [0.0, 0.0]]), classes=1)
    assert other.top1 == 0.5
    assert "class" not in str(gt.compare(torch.relu, torch.relu, torch.ones(3)))


def test_numbers_that_are_none_are_infinitely_far_unless_both_have_them() -> None:
    x = torch.tensor([float("nan"), inf, 1.0])
    assert gt.compare(torch.relu, torch.relu, x).largest_error == 0
    assert gt.compare(torch.relu, lambda x: torch.relu(x).nan_to_num(), x).largest_error == inf


def test_both_parts_of_complex_numbers_are_compared() -> None:
    found = gt.compare(lambda x: x + 0j, lambda x: x + 3j, torch.ones(2))
    assert (found.largest_error, found.largest) == (3.0, 1.0)


def test_an_output_that_the_next_call_writes_to_is_copied() -> None:
    kept = torch.zeros(1, dtype=torch.float64)
    found = gt.compare(kept.copy_, lambda x: x, [torch.ones(1), torch.zeros(1)])
    assert found.largest_error == 0


@pytest.mark.parametrize(
    ("other", "inputs", "classes", "told"),
    [
        (torch.sum, torch.ones(2, 3), None, r"shapes \[\[2, 3\]\] and \[\[\]\]"),
        (torch.relu, [], None, "no example inputs"),
        (torch.relu, torch.ones(2, 3), 2, "classes = 2 is no dimension of it"),
        (len, torch.ones(2, 3), None, "returns a int, in which no tensor is found"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    other: Any,  # noqa: ANN401 - a function
    inputs: Any,  # noqa: ANN401 - tensors
    classes: int | None,
    told: str,
) -> None:
    with pytest.raises(InvalidSetting, match=told):
        gt.compare(torch.relu, other, inputs, classes=classes)
