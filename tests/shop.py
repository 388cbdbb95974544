"""A service where nothing is tuned yet, what a worker does there, and checks of who asks it."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
from served import Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.measuring_lock import measuring
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens

WITHIN_S = 30.0
WORKER = "worker"


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(kw_only=True)
class Shop:
    """A service where nothing is tuned, and a worker that does what a test says."""

    site: Site
    build: Build
    folder: Path
    jobs: Jobs = field(init=False)
    tokens: Tokens = field(init=False)

    def __post_init__(self) -> None:
        engine = open_database(self.site.settings.database_url)
        self.jobs, self.tokens = Jobs(engine), Tokens(engine)

    def client(self, address: str, *scopes: Scope) -> Client:
        """Return a client that may ask and, by default, have problems tuned."""
        allowed = scopes or (Scope.RESOLVE, Scope.TUNE)
        _token, secret = self.tokens.create("ci", allowed, actor="test", now=now())
        return Client(
            address, cache_dir=self.folder / "cache", token=secret.text, timeout_s=WITHIN_S
        )

    def claim(self) -> Job:
        """Take the job that is asked for soon."""
        until_s = time.monotonic() + WITHIN_S
        while time.monotonic() < until_s:
            classes = [detect_cpu().class_key]
            job = self.jobs.claim(WORKER, class_keys=classes, now=now(), lease_s=60)
            if job is not None:
                return job
            time.sleep(0.01)
        raise AssertionError("no job came")

    def finish(self, job: Job, state: JobState = JobState.DONE, detail: str = "tuned") -> None:
        """End a job."""
        self.jobs.finish(job.id, WORKER, state, detail, now())

    def tune(self, speed: float = 10.0) -> None:
        """Do the next job: its kernel is so many times as fast as the baseline.

        As a worker does, only while nobody else measures.
        """
        with measuring():
            job = self.claim()
            keep_trial(self.site.repository, self.build, cpu=detect_cpu(), speed=speed)
            self.finish(job)

    @contextmanager
    def working(self, work: Callable[[], None]) -> Iterator[None]:
        """Let a worker do something meanwhile."""
        worker = threading.Thread(target=work)
        worker.start()
        try:
            yield
        finally:
            worker.join()


def compute(kernel: Any, packed: Any = None) -> None:  # noqa: ANN401 - of either kind
    """Check a call with weights that are packed already, or now."""
    generator = np.random.default_rng(3)
    x, w, bias = (generator.standard_normal(shape) for shape in ((8, 16), (32, 16), (32,)))
    packed = kernel.pack(w.astype(np.float32)) if packed is None else packed
    y = kernel(x.astype(np.float32), packed, bias=bias.astype(np.float32))
    np.testing.assert_allclose(y, np.maximum(x @ w.T + bias, 0), rtol=1e-3, atol=1e-4)


def pack(kernel: Any) -> Any:  # noqa: ANN401 - of either kind
    w = np.random.default_rng(3)
    w.standard_normal((8, 16))
    return kernel.pack(w.standard_normal((32, 16)).astype(np.float32))


def settled(kernel: Kernel | FallbackKernel | SwappedKernel) -> SwappedKernel:
    """Return a kernel once it is known what computes for good."""
    assert isinstance(kernel, SwappedKernel)
    until_s = time.monotonic() + WITHIN_S
    while not kernel.is_settled and time.monotonic() < until_s:
        time.sleep(0.01)
    assert kernel.is_settled
    return kernel


def swapped_in(kernel: Kernel | FallbackKernel | SwappedKernel) -> Kernel:
    """Return the kernel that computes for good, once one does."""
    final = settled(kernel).kernel
    assert isinstance(final, Kernel), kernel.reason
    return final


def background_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "gemm-tuner-background"]


def is_collected(gone: "ref[Client]") -> bool:
    gc.collect()  # a client refers to itself
    return gone() is None


def ends(is_so: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + WITHIN_S
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.01)
    return is_so()
