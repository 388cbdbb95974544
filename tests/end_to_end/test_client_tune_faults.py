"""Having problems tuned, while forks, interrupts and a bad service come in between."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from served import PROBLEM, keep_trial
from shop import Shop, compute, ends, pack, swapped_in
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from gemm_tuner import Client, files
from gemm_tuner.client import background
from gemm_tuner.client.keys import KnownKeys
from gemm_tuner.client.loading import Loader
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.errors import StoreFailed
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel

PROBLEMS = [f"f32 {m}x32x16 nk bias+relu" for m in range(1, 41)]
CALLERS = 12
SOON_S = 20.0


@dataclass(kw_only=True)
class Hindrance:
    """Answers some requests late, or with a fault."""

    concerns: Callable[[AsgiScope], bool]
    delay_s: float = 0.0
    faults: int = 0  # so many are answered with one
    seen: int = field(default=0, init=False)
    answered: int = field(default=0, init=False)

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def middle(scope: AsgiScope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and self.concerns(scope):
                self.seen += 1
                await asyncio.sleep(self.delay_s)
                if self.seen <= self.faults:
                    await Response(b"{}", status_code=500)(scope, receive, send)
                    return
            await app(scope, receive, send)
            self.answered += scope["type"] == "http" and self.concerns(scope)

        return middle


def _asks_to_tune(scope: AsgiScope) -> bool:
    return bool(scope["query_string"])


def _child(work: Callable[[], bool]) -> int:
    """Fork a child that does something; its status is 0 if that was as it should be."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            status = 0 if work() else 2
        os._exit(status)
    return child


def _end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_that_asks_again_gets_the_kernel_too(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        packed = pack(kernel)
        job = shop.claim()

        def ask_again() -> bool:
            again = client.kernel(PROBLEM, tune="background")
            swapped_in(again)
            compute(again, packed)
            return again is kernel

        child = _child(ask_again)
        keep_trial(shop.site.repository, shop.build, cpu=detect_cpu(), speed=10)
        shop.finish(job)

        assert _end(child) == 0
        assert swapped_in(kernel)


def test_a_fork_while_a_key_is_remembered_holds_up_nobody(tmp_path: Path) -> None:
    keys = KnownKeys(tmp_path / "known-keys.json")
    is_over, end = os.pipe()
    with keys._changing():
        child = _child(lambda: os.read(is_over, 1) == b"x")
    remembering = threading.Thread(target=keys.forget, args=("http://a",), daemon=True)
    remembering.start()
    remembering.join(SOON_S)
    is_held_up = remembering.is_alive()
    os.write(end, b"x")

    assert _end(child) == 0
    assert not is_held_up


def test_waiting_for_a_service_that_answers_late_ends_in_time(shop: Shop) -> None:
    late = Hindrance(concerns=_asks_to_tune, delay_s=SOON_S)
    with shop.site.serving(around=late) as address:
        client = shop.client(address)
        client.kernel(PROBLEM)

        began_s = time.monotonic()
        kernel = client.kernel(PROBLEM, tune="wait", tune_timeout_s=0.2)

        assert time.monotonic() - began_s < SOON_S
    assert isinstance(kernel, FallbackKernel)
    assert "It is not being tuned" in kernel.reason


def test_many_problems_are_waited_for_no_longer_than_one(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        client.kernels(PROBLEMS)

        began_s = time.monotonic()
        kernels = client.kernels(PROBLEMS, tune="wait", tune_timeout_s=1.5)

        assert time.monotonic() - began_s < 15  # in turn, four at once, it is longer
    reasons = [kernel.reason for kernel in kernels]
    assert any("was not over after 1.5 s" in reason for reason in reasons)
    # Some are not even asked for in time where the machine is busy.
    assert all("was not over" in one or "is not being tuned" in one for one in reasons), reasons


@pytest.mark.parametrize("wakes_main_thread", [True, False])
def test_an_interrupt_ends_a_wait_for_many_problems(shop: Shop, *, wakes_main_thread: bool) -> None:
    """A signal may arrive just before the main thread begins to wait, and then wakes nobody."""

    def interrupt() -> None:
        shop.claim()
        if wakes_main_thread:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with shop.site.serving() as address, shop.working(interrupt):
        client = shop.client(address)
        began_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.kernels(PROBLEMS[:6], tune="wait", tune_timeout_s=120)

        assert time.monotonic() - began_s < 60


def test_a_fault_after_the_job_costs_no_kernel(shop: Shop) -> None:
    fault = Hindrance(concerns=lambda scope: scope["path"] == "/v1/resolve" and is_over.is_set())
    fault.faults = 1
    is_over = threading.Event()
    with shop.site.serving(around=fault) as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        job = shop.claim()
        keep_trial(shop.site.repository, shop.build, cpu=detect_cpu(), speed=10)
        is_over.set()
        shop.finish(job)

        assert swapped_in(kernel)
    assert fault.seen == 2


def test_a_service_that_is_away_at_first_is_asked_a_little_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_ANSWER_S", 20.0)
    fault = Hindrance(concerns=_asks_to_tune, faults=1)
    with shop.site.serving(around=fault) as address, shop.working(shop.tune):
        client = shop.client(address)  # one that is gone lets nothing be tuned
        kernel = client.kernel(PROBLEM, tune="background")

        assert swapped_in(kernel)


def test_who_waits_for_the_same_problem_gets_the_same_kernel(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    load = Loader._load

    def count(self: Loader, *given: Any) -> Kernel:  # noqa: ANN401 - handed on
        loads.append(given)
        return load(self, *given)

    monkeypatch.setattr(Loader, "_load", count)
    asked = Hindrance(concerns=_asks_to_tune)
    with shop.site.serving(around=asked) as address, ThreadPoolExecutor(CALLERS) as pool:
        client = shop.client(address)
        calls = [pool.submit(client.kernel, PROBLEM, tune="wait") for _caller in range(CALLERS)]
        assert ends(lambda: asked.answered == CALLERS)
        shop.tune()
        found = [call.result() for call in calls]

    assert len(set(map(id, found))) == 1
    assert len(loads) == 1


def test_offline_nothing_is_tuned(shop: Shop) -> None:
    client = Client("http://127.0.0.1:9", cache_dir=shop.folder / "cache", offline=True)

    kernel = client.kernel(PROBLEM, tune="background")

    assert not isinstance(kernel, SwappedKernel)
    assert "this client is offline" in kernel.reason


def test_a_download_that_fails_after_the_job_is_tried_again_soon(shop: Shop) -> None:
    faults = iter([b"", b"another kernel"])

    def edit(path: str, content: bytes) -> bytes | None:
        return next(faults, content) if path.startswith("/v1/artifacts/") else content

    with shop.site.serving(edit) as address, shop.working(shop.tune):
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")

        found = swapped_in(kernel)
        assert client.kernel(PROBLEM) is found


def test_a_process_that_never_lets_go_of_a_lock_holds_up_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_LOCK_S", 0.2)
    keys, errors = KnownKeys(tmp_path / "known-keys.json"), list[str]()

    def remember() -> None:
        try:
            keys.forget("http://a")
        except StoreFailed as error:
            errors.append(str(error))

    with files.locked(tmp_path / "known-keys.lock"):
        remembering = threading.Thread(target=remember, daemon=True)
        remembering.start()
        remembering.join(SOON_S)
        assert not remembering.is_alive()

    assert "known-keys.lock is locked by a process that hangs; end it" in errors[0]
    remember()
    assert len(errors) == 1
