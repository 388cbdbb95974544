import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gemm_tuner.client.single_flight import Once

WAIT_S = 30


def test_a_slow_question_does_not_hold_up_another() -> None:
    once = Once[str, str](lambda _found: True)
    is_asked, may_end = threading.Event(), threading.Event()

    def look_slowly() -> str:
        is_asked.set()
        assert may_end.wait(WAIT_S)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(once.find, "a", look_slowly)
        assert is_asked.wait(WAIT_S)
        assert once.find("b", lambda: "fast") == "fast"
        may_end.set()
        assert slow.result(WAIT_S) == "slow"


def test_many_threads_that_ask_the_same_get_what_one_found() -> None:
    once = Once[str, object](lambda _found: True)
    barrier = threading.Barrier(8)
    looked: list[object] = []

    def look() -> object:
        looked.append(object())
        return looked[-1]

    def ask(_number: int) -> object:
        barrier.wait(WAIT_S)
        return once.find("a", look)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))

    assert found == {looked[0]}
    assert len(looked) == 1


def test_what_is_not_kept_and_what_failed_is_looked_for_again() -> None:
    once = Once[str, int](lambda found: found > 1)
    with pytest.raises(ZeroDivisionError):
        once.find("a", lambda: 1 // 0)

    assert [once.find("a", partial(int, value)) for value in (1, 2, 3)] == [1, 2, 2]


def test_a_thread_that_was_interrupted_leaves_the_question_to_the_next() -> None:
    once = Once[str, int](lambda _found: True)

    def interrupt() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once.find("a", interrupt)

    assert once.find("a", lambda: 1) == 1


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent() -> None:
    once = Once[str, str](lambda _found: True)
    is_asked, may_end = threading.Event(), threading.Event()

    def look_slowly() -> str:
        is_asked.set()
        assert may_end.wait(WAIT_S)
        return "parent's"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(once.find, "a", look_slowly)
        assert is_asked.wait(WAIT_S)
        child = os.fork()
        if child == 0:
            os._exit(0 if once.find("a", lambda: "child's") == "child's" else 1)
        may_end.set()
        assert slow.result(WAIT_S) == "parent's"

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_does_not_hold_any_more_is_looked_for_once() -> None:
    revoked: set[str] = set()
    looked: list[str] = []
    once = Once[str, str](
        lambda found: found == "kernel", holds=lambda found: found not in revoked, brief_s=60
    )

    def look() -> str:
        looked.append("kernel" if not revoked else "library")
        return looked[-1]

    assert once.find("a", look) == "kernel"
    revoked.add("kernel")

    assert [once.find("a", look) for _ask in range(3)] == ["library"] * 3
    assert looked == ["kernel", "library"]
