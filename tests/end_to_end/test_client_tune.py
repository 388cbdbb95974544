"""`Client.kernel(tune=...)`: a problem that is not tuned becomes a kernel without a person."""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from served import PROBLEM, Site, keep_trial
from shop import Shop, background_threads, compute, ends, is_collected, pack, settled, swapped_in
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.client import background, tuning
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import JobState
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.sources import ServedKernels, tune_or_tell
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel


def test_waiting_returns_the_tuned_kernel(shop: Shop) -> None:
    with shop.site.serving() as address, shop.working(shop.tune):
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="wait")

        assert isinstance(kernel, Kernel)
        compute(kernel)
        assert client.kernel(PROBLEM) is kernel
        assert client.kernel(PROBLEM, tune="wait") is kernel
        assert client.kernel(PROBLEM, tune="background") is kernel
    assert len(shop.jobs.newest(10)) == 1


def test_in_the_background_the_library_computes_until_the_kernel_is_there(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        assert isinstance(kernel, SwappedKernel)
        assert kernel.reason.startswith("It is being tuned, and until then:")
        assert client.kernel(PROBLEM, tune="background") is kernel
        packed = pack(kernel)
        compute(kernel, packed)
        assert isinstance(kernel.kernel, FallbackKernel)

        shop.tune()

        assert swapped_in(kernel)
        assert kernel.reason.startswith("tuned, measured on this CPU: 10.000 times")
        compute(kernel, packed)
        compute(kernel)
        assert client.kernel(PROBLEM) is kernel.kernel


def test_all_layers_of_a_model_are_tuned_in_one_wait(shop: Shop) -> None:
    other = replace(PROBLEM, n=7)

    def tune_one_of_two() -> None:
        for job in (shop.claim(), shop.claim()):
            if job.problem == PROBLEM:
                keep_trial(shop.site.repository, shop.build, cpu=detect_cpu(), speed=10)
                shop.finish(job)

    with shop.site.serving() as address, shop.working(tune_one_of_two):
        client = shop.client(address)
        first, second, again = client.kernels(
            [PROBLEM, other, PROBLEM], tune="wait", tune_timeout_s=8
        )

        assert isinstance(first, Kernel)
        assert again is first
        assert isinstance(second, FallbackKernel)
        assert "was not over after 8 s" in second.reason
    assert len(shop.jobs.newest(10)) == 2, "one for each problem"


def test_all_layers_of_a_model_are_tuned_in_the_background(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        [kernel, again] = client.kernels([PROBLEM, PROBLEM], tune="background")
        assert again is kernel
        assert client.kernel(PROBLEM, tune="background") is kernel
        assert client.kernels([PROBLEM], tune="background") == [kernel]

        shop.tune()

        assert swapped_in(kernel)


def test_calls_of_many_threads_are_right_while_the_kernel_comes(shop: Shop) -> None:
    stop = threading.Event()
    faults: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                compute(kernel, packed)
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        packed = pack(kernel)
        threads = [threading.Thread(target=call) for _thread in range(8)]
        for thread in threads:
            thread.start()
        try:
            shop.tune()
            settled(kernel)
            time.sleep(0.2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    assert not faults
    assert swapped_in(kernel)


def test_without_tuning_no_job_is_asked_for(shop: Shop) -> None:
    with shop.site.serving() as address:
        kernel = shop.client(address).kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert not shop.jobs.newest(1)


def test_what_is_tuned_already_is_no_job(site: Site, build: Build, tmp_path: Path) -> None:
    shop = Shop(site=site, build=build, folder=tmp_path)
    with site.serving() as address:
        for tune in ("wait", "background"):
            assert isinstance(shop.client(address).kernel(PROBLEM, tune=tune), Kernel)

    assert not shop.jobs.newest(1)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_brings_nothing_leaves_the_library_and_says_why(
    shop: Shop, state: JobState
) -> None:
    with (
        shop.site.serving() as address,
        shop.working(lambda: shop.finish(shop.claim(), state, "no compiler is installed.")),
    ):
        kernel = shop.client(address).kernel(PROBLEM, tune="wait")

    assert isinstance(kernel, FallbackKernel)
    assert f"is {state}: no compiler is installed." in kernel.reason
    compute(kernel)


def test_a_model_is_told_why_a_service_tuned_nothing(shop: Shop) -> None:
    wanted = WantedLayer(n=32, k=16, rows=(8,), dtype="f32", epilogue="bias+relu", threads=1)
    with (
        shop.site.serving() as address,
        shop.working(lambda: shop.finish(shop.claim(), JobState.FAILED, "no compiler.")),
    ):
        source = ServedKernels(shop.client(address), may_tune=True)
        assert "is failed: no compiler." in tune_or_tell(source, wanted, 1.0)


def test_a_faster_baseline_ends_the_wait(shop: Shop) -> None:
    with shop.site.serving() as address, shop.working(lambda: shop.tune(speed=0.5)):
        kernel = shop.client(address).kernel(PROBLEM, tune="wait")

    assert isinstance(kernel, FallbackKernel)
    assert "0.500 times the speed of the baseline" in kernel.reason


def test_waiting_ends_when_its_time_is_up_and_says_that_nobody_works(shop: Shop) -> None:
    with shop.site.serving() as address:
        begin_s = time.monotonic()
        kernel = shop.client(address).kernel(PROBLEM, tune="wait", tune_timeout_s=4.0)
        passed_s = time.monotonic() - begin_s

    assert isinstance(kernel, FallbackKernel)
    assert "was not over after 4 s: it is waiting, and no worker" in kernel.reason
    assert 4 <= passed_s < 60
    assert shop.jobs.newest(1)[0].state is JobState.WAITING


@pytest.mark.parametrize("tune", ["wait", "background"])
def test_without_the_scope_it_is_as_without_tuning(shop: Shop, tune: str) -> None:
    with shop.site.serving() as address:
        kernel = shop.client(address, Scope.RESOLVE).kernel(PROBLEM, tune=tune)
        told = kernel if tune == "wait" else settled(kernel)

        assert "It is not being tuned" in told.reason
        assert "scope tune" in told.reason
        compute(kernel)


@pytest.mark.parametrize("tune", ["wait", "background"])
def test_without_a_service_it_is_as_without_tuning(
    tmp_path: Path, tune: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FIRST_ANSWER_S", 0.1)
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")

    kernel = client.kernel(PROBLEM, tune=tune)

    told = kernel if tune == "wait" else settled(kernel)
    assert "It is not being tuned" in told.reason
    compute(kernel)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"id": "../../v1/keys", "state": "waiting"},
        {"id": "0" * 33, "state": "waiting"},
        {"id": "0" * 32, "state": "lost"},
        {"id": "0" * 32, "state": "failed", "detail": "\x1b[31m" * 10 + "x" * 5000},
        {"id": "0" * 32, "state": "failed", "detail": "x" * 10**5},
        [],
    ],
    ids=str,
)
def test_what_a_service_says_of_a_job_is_not_trusted(shop: Shop, job: object) -> None:
    content = json.dumps({"job": job}).encode()

    def around(app: ASGIApp) -> ASGIApp:
        async def middle(scope: AsgiScope, receive: Receive, send: Send) -> None:
            if scope.get("query_string"):
                await Response(content, status_code=202)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return middle

    with shop.site.serving(around=around) as address:
        kernel = shop.client(address).kernel(PROBLEM, tune="wait", tune_timeout_s=5)

    assert isinstance(kernel, FallbackKernel)
    assert "not understood" in kernel.reason or "is failed" in kernel.reason
    assert kernel.reason.isprintable()
    assert len(kernel.reason) < 2000


@pytest.mark.parametrize(
    "wrong",
    [
        {"tune": "always"},
        {"tune": ""},
        {"tune": "wait", "tune_timeout_s": 0},
        {"tune": "wait", "tune_timeout_s": float("nan")},
        {"tune": "wait", "tune_timeout_s": float("inf")},
        {"tune": "wait", "tune_timeout_s": 1e9},
    ],
    ids=str,
)
def test_a_way_to_tune_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")

    with pytest.raises(InvalidSetting, match="tune"):
        client.kernel(PROBLEM, **wrong)


@pytest.mark.parametrize("tune", ["wait", "background"])
def test_what_is_locked_is_not_tuned(shop: Shop, tune: str) -> None:
    lock = shop.folder / "gemm-tuner.lock"
    with shop.site.serving() as address:
        client = shop.client(address)
        client.kernel(PROBLEM)
        client.write_lock(lock)
        locked = Client(address, cache_dir=shop.folder / "cache", lock=lock, frozen=True)

        kernel = locked.kernel(PROBLEM, tune=tune)

    assert isinstance(kernel, FallbackKernel)
    assert not shop.jobs.newest(1)


def test_a_forked_child_goes_on_and_has_problems_tuned_itself(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        packed = pack(kernel)
        job = shop.claim()
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                compute(kernel, packed)
                client.kernel("f32 9x32x16 nk none", tune="background")
                assert len(background_threads()) == 1
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        keep_trial(shop.site.repository, shop.build, cpu=detect_cpu(), speed=10)
        shop.finish(job)

        assert swapped_in(kernel)


def test_a_problem_is_given_up_after_a_while(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LONGEST_TUNE_S", 3.0)
    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = settled(client.kernel(PROBLEM, tune="background"))

        assert "was not over after 3 s" in kernel.reason
        # and is not asked for again at once
        assert isinstance(client.kernel(PROBLEM, tune="background"), FallbackKernel)


def test_the_thread_ends_with_its_work_and_begins_again(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        for problem in (PROBLEM, "f32 9x32x16 nk none"):
            kernel = client.kernel(problem, tune="background")
            shop.finish(shop.claim(), JobState.FAILED, "no")
            settled(kernel)
            assert ends(lambda: not background_threads())


def test_the_thread_ends_with_the_client_and_the_library_goes_on(shop: Shop) -> None:
    with shop.site.serving() as address:
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        packed = pack(kernel)
        gone = ref(client)
        del client

        assert ends(lambda: is_collected(gone) and not background_threads())
        assert "its client is gone" in settled(kernel).reason
        compute(kernel, packed)


@pytest.mark.proof
def test_while_the_service_is_away_a_job_is_waited_for(shop: Shop) -> None:
    with shop.site.serving() as address:
        port = int(address.rsplit(":", 1)[1])
        client = shop.client(address)
        kernel = client.kernel(PROBLEM, tune="background")
        job = shop.claim()
    keep_trial(shop.site.repository, shop.build, cpu=detect_cpu(), speed=10)
    shop.finish(job)
    time.sleep(0.5)

    with shop.site.serving(port=port):
        assert swapped_in(kernel)


def test_pauses_grow_up_to_a_bound() -> None:
    found = [pause for pause, _number in zip(tuning.pauses(5.0), range(20), strict=False)]

    assert found == sorted(found)
    assert found[0] < 0.5
    assert found[-1] == 5.0
