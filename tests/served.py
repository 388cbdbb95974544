"""A real kernel in a real store, served over real HTTP."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpcore
import numpy as np
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.server.connections import server_config
from gemm_tuner_service.settings import Settings
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Measurement, Raced, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.tuning.generator import generator_version

PROBLEM = Problem.parse("f32 8x32x16 nk bias+relu")
FEW = replace(PROBLEM, m=Rows(low=1, high=12))
CANDIDATE = Candidate.parse("scalar_f32_2x4 mc8_nc32_kc16 jc_ic_jr_ir")
_SEED = 7  # of inputs

# Changes the body of an answer on its way, given the path of the request; None stands for 404.
Edit = Callable[[str, bytes], bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place where a service lives: its database and its key."""

    settings: Settings
    repository: Repository

    @classmethod
    def at(cls, url: str, key_path: Path, repository: Repository) -> "Site":
        """Return a place with this database and key."""
        settings = Settings(database_url=url, signing_key_path=key_path)
        return cls(settings=settings, repository=repository)

    @property
    def key_pair(self) -> KeyPair:
        """Return the key of the service."""
        return KeyPair.load_or_create(self.settings.signing_key_path)

    @contextmanager
    def serving(
        self,
        edit: Edit | None = None,
        *,
        port: int = 0,
        around: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> Iterator[str]:
        """Run the service on a free port, with someone in the middle who edits its answers.

        `around` puts anything else in the middle.
        """
        app: ASGIApp = create_app(self.settings)
        app = around(app) if around else app
        config = server_config(
            _edited(app, edit) if edit else app, log_level="error", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=server.run, args=([listener],))
            # Connections queue from here on, so that nobody has to wait for the start.
            listener.listen()
            thread.start()
            try:
                # Unlike httpx, this reads no certificates for an address without TLS.
                assert httpcore.request("GET", f"{address}/healthz").status == 200
                yield address
            finally:
                server.should_exit = True
                thread.join()


def keep_trial(
    repository: Repository,
    build: Build,
    *,
    cpu: Cpu,
    speed: float,
    threads: int = 1,
    baseline: str = "onednn 3.2.0",
    raced: tuple[Raced, ...] = (),
    problem: Problem = PROBLEM,
    candidate: Candidate = CANDIDATE,
) -> None:
    """Store a trial of a problem in which the kernel was `speed` times as fast as the baseline."""
    text = build.source.text
    repository.add_build(build.artifact, binary=build.binary, source_text=text)
    repository.add_trial(
        Trial(
            created_at=datetime.now(UTC),
            problem=problem,
            cpu=cpu,
            context=ExecutionContext(threads=threads),
            candidate=candidate,
            toolchain=build.artifact.toolchain,
            generator=generator_version(),
            stage=Stage.CONFIRM,
            outcome=Outcome.CORRECT,
            artifact=build.artifact,
            measurement=Measurement(
                candidate=Timing(calls_per_sample=1, samples_ns=(round(10_000 / speed),) * 20),
                baseline=baseline,
                baseline_timing=Timing(calls_per_sample=1, samples_ns=(10_000,) * 20),
                raced=raced,
            ),
        )
    )


def _edited(app: ASGIApp, edit: Edit) -> ASGIApp:
    """Return `app` behind someone who changes the bodies of its answers."""

    async def middle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        start: list[Message] = []
        body = bytearray()

        async def hold(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            edited = edit(scope["path"], bytes(body))
            changed = b"not here" if edited is None else edited
            status = 404 if edited is None else start[0]["status"]
            headers = [each for each in start[0]["headers"] if each[0] != b"content-length"]
            if edited is not None and changed != bytes(body):
                status = 200
            await send({**start[0], "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": changed})

        await app(scope, receive, hold)

    return middle


def assert_computes(kernel: Kernel | FallbackKernel, problem: Problem) -> None:
    """Check what a kernel, or a library in its place, computes of a problem in f32."""
    inputs = make_inputs(problem, InputKind.NORMAL, _SEED)
    out = np.empty((problem.m.high, problem.n), np.float32)

    packed = kernel.pack(inputs.w)
    operands: dict[str, Any] = {**inputs.operands}

    y = kernel(inputs.x, packed, out=out, **operands)

    assert y is out
    assert find_error(compute_expected(problem, inputs), out) is None
