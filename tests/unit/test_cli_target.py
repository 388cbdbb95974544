import pytest

from gemm_tuner.cli.target import time_left_s


@pytest.mark.parametrize(
    ("elapsed_s", "done", "longest_s", "expected_s"),
    [
        (0.0, 0.0, 30.0, 30.0),
        (6.0, 2 / 3, 28.0, 3.0),
        (6.0, 0.01, 28.0, 28.0),
        (9.0, 1.0, 28.0, 0.0),
    ],
)
def test_the_time_left_of_proofs_is_that_of_their_pace(
    elapsed_s: float, done: float, longest_s: float, expected_s: float
) -> None:
    left_s = time_left_s(elapsed_s, done=done, longest_s=longest_s)

    assert left_s == pytest.approx(expected_s)
