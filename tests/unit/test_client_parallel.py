"""Many questions at once: what an error and an interrupt among them mean for the others."""

import subprocess
import sys
import threading
import time

import pytest

from gemm_tuner.client import parallel
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


def test_results_are_in_the_order_of_the_items() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 if item % 2 else 0)
        return -item

    assert each_at_once(work, range(40)) == [-item for item in range(40)]
    assert each_at_once(work, []) == []


@pytest.mark.parametrize("items", [1, 3])
def test_a_program_that_ends_does_not_wait(items: int) -> None:
    code = f"""
import threading, time
from gemm_tuner.client import parallel
from gemm_tuner.client.parallel import each_at_once
ask = lambda: each_at_once(lambda _: time.sleep(60), range({items}))
threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_at_the_end_of_the_interpreter_no_thread_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts none any more, and says so by a RuntimeError."""

    class Ended(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(parallel, "Thread", Ended)

    assert each_at_once(lambda item: 2 * item, [1, 2, 3]) == [2, 4, 6]
