"""Many questions at once: what an error and an interrupt among them mean for the others."""

import pytest

from gemm_tuner.client.parallel import each_at_once


@pytest.mark.parametrize("fault", [RuntimeError, ValueError, KeyboardInterrupt])
def test_a_fault_is_raised_once_and_what_others_wait_for_is_given_up(
    fault: type[BaseException],
) -> None:
    begun: list[int] = []
    given_up: list[bool] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise fault
        return item

    with pytest.raises(fault):
        each_at_once(work, [0, 1, 2], lambda: given_up.append(True))

    assert sorted(begun) == sorted(set(begun)), "nothing is done again"
    assert given_up == [True]
