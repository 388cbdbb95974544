"""Many processes start at once with one empty cache, and need the same kernels.

CROWD_PROCESSES=200 CROWD_KERNELS=50 pytest -m proof tests/end_to_end/test_client_crowd.py
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pytest
from served import CANDIDATE, PROBLEM, Site, keep_trial
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner import Client
from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.client import loading
from gemm_tuner.client.cache import Cache
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.catalog import family_named

pytestmark = [pytest.mark.proof, pytest.mark.long, pytest.mark.timeout(600)]

PROCESSES = int(os.environ.get("CROWD_PROCESSES", "50"))
KERNELS = int(os.environ.get("CROWD_KERNELS", "20"))
MOST_DOWNLOADS = 3  # of one kernel: who waits too long for another process fetches it too
LONGEST_S = 480.0


@dataclass
class Downloads:
    """Counts how often each artifact was sent; to be told to come back later is no download."""

    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind the counter."""

        async def middle(scope: Scope, receive: Receive, send: Send) -> None:
            path = str(scope.get("path", ""))

            async def count(message: Message) -> None:
                if path.startswith("/v1/artifacts/") and message.get("status") == HTTPStatus.OK:
                    self.counts[path.rpartition("/")[2]] += 1
                await send(message)

            await app(scope, receive, count)

        return middle


def _build(problem: Problem) -> Build:
    family = family_named(CANDIDATE.micro_kernel.family)
    source = render(problem, CANDIDATE, family)
    return compile_kernel(source, isa=family.isa, toolchain=find_toolchain())


def _fork(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return child


def _kill(children: list[int]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_each_kernel_is_downloaded_a_few_times_at_most_and_all_are_right(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_LONGEST_WAIT_S", LONGEST_S)  # all share two cores
    problems = [replace(PROBLEM, n=PROBLEM.n + 2 * number) for number in range(KERNELS)]
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(_build, problems))
    for problem, build in zip(problems, builds, strict=True):
        keep_trial(site.repository, build, cpu=detect_cpu(), speed=10, problem=problem)
    generator = np.random.default_rng(1)
    operands = []
    for problem in problems:
        x, w, bias = (
            generator.standard_normal(shape).astype(np.float32)
            for shape in ((problem.m.high, problem.k), (problem.n, problem.k), (problem.n,))
        )
        expected = np.maximum(x.astype(np.float64) @ w.T.astype(np.float64) + bias, 0)
        operands.append((x, w, bias, expected))

    def work() -> bool:
        os.close(start)
        os.read(may_start, 1)
        client = Client(address, cache_dir=tmp_path / "cache", timeout_s=LONGEST_S)
        kernels = client.kernels(problems)
        for kernel, (x, w, bias, expected) in zip(kernels, operands, strict=True):
            y = kernel(x, kernel.pack(w), bias=bias)
            if not np.allclose(y, expected, rtol=1e-4, atol=1e-5):
                return False
        missed = {kernel.reason for kernel in kernels if not isinstance(kernel, Kernel)}
        for reason in missed:
            print(f"no kernel: {reason}", flush=True)  # noqa: T201 - for whoever looks why it failed
        return not missed

    downloads = Downloads()
    crowd = replace(site, settings=replace(site.settings, client_rate=1_000_000))
    with crowd.serving(around=downloads) as address:
        Client(address, cache_dir=tmp_path / "other").resolve(PROBLEM)  # remembers the key
        may_start, start = os.pipe()
        children = [_fork(work) for _process in range(PROCESSES)]
        os.close(may_start)
        os.close(start)
        watchdog = threading.Timer(LONGEST_S, _kill, (children,))
        watchdog.start()
        codes = Counter(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in children)
        watchdog.cancel()

    assert codes == {0: PROCESSES}, "each process has all kernels, and each is right"
    assert len(downloads.counts) == KERNELS
    assert max(downloads.counts.values()) <= MOST_DOWNLOADS
    cache = Cache(tmp_path / "cache")
    for build in builds:
        assert cache.artifact(build.artifact.sha256) == build.binary
    kept = {path.name for path in (tmp_path / "cache" / "artifacts").iterdir()}
    assert {build.artifact.sha256 for build in builds} <= kept
