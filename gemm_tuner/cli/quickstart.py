"""`gemm-tuner quickstart`: the whole path on three real layers, in a few minutes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import typer

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.sweep import sweep_layers
from gemm_tuner.cli.terminal.output import print_line, print_message
from gemm_tuner.client.client import Client
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import time_text
from gemm_tuner.errors import ServiceUnreachable
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.scratch import scratch_folder
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import default_database_url, open_database
from gemm_tuner.trust.keys import KeyPair, default_key_path
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings

_LAYERS = tuple(
    Layer(name=name, problem=Problem.parse(text))
    for name, text in (
        ("a small layer", "f32 64x32x16 nk bias+relu"),
        ("BERT base feed-forward up", "f32 128x3072x768 nk bias+gelu_erf"),
        ("a decoder's projection", "f32 1x4096x4096 nk none"),
    )
)
# Where another service of this user listens, and how.
_OF_OTHERS = frozenset(
    {
        "GEMM_TUNER_HOST",
        "GEMM_TUNER_PORT",
        "GEMM_TUNER_TLS_CERTIFICATE",
        "GEMM_TUNER_TLS_KEY",
    }
)
_START_TIMEOUT_S = 30.0
_TIMED_S = 0.5
_SEED = 1


def quickstart(
    budget: options.Budget = "20s",
    *,
    again: options.Again = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Tune three real layers against oneDNN, serve them, fetch a kernel and call it."""
    cpu = detect_cpu()
    toolchain = find_toolchain()
    print_line(f"CPU: {cpu.brand}, {isa_text(cpu.isa)}")
    print_line(f"compiler: {toolchain.text}\n")

    url = db or default_database_url()
    settings = SweepSettings(
        budget_s=options.parse_duration_s(budget), toolchain=toolchain, again=again
    )
    swept = sweep_layers(
        _LAYERS,
        contexts=(ExecutionContext(),),
        cpu=cpu,
        repository=Repository(open_database(url)),
        settings=settings,
        is_quiet=False,
    )
    if swept.is_stopped:
        print_message("Stopped; what was found is kept: run quickstart again to resume.")
    if swept.is_stopped or not swept.found:
        raise typer.Exit(1)

    with _service(url) as address:
        print_line(f"The service is up at {address}; fetching a kernel through the client.")
        public_key = KeyPair.load_or_create(default_key_path()).public_key
        _call(Client(address, public_keys=[public_key]), _most_telling(swept.found))
    print_line(
        "\nNext: gemm-tuner sweep M N K --epilogue bias+relu   tune a layer of yours\n"
        "      gemm-tuner serve                               share what was found\n"
        "      README.md                                      call kernels from Python and C"
    )
    if swept.failures:
        raise typer.Exit(1)


def _most_telling(found: list[tuple[Layer, SweepResult]]) -> Problem:
    """Return the largest problem that has a kernel: its calls are the least diluted by Python."""
    verdicts = [result.verdict for _layer, result in found]
    served = [verdict for verdict in verdicts if verdict.artifact is not None] or verdicts
    problems = [verdict.problem for verdict in served]
    return max(problems, key=lambda problem: problem.flop(problem.m.high))


def _call(client: Client, problem: Problem) -> None:
    """Fetch the kernel for a problem, call it, check the result and print its speed."""
    kernel = client.kernel(problem)
    if isinstance(kernel, FallbackKernel):
        print_line(f"{kernel.library} computes {problem.text}: {kernel.reason}")
    else:
        print_line(f"{problem.text}: {kernel.candidate.text}, sha256 {kernel.artifact.sha256[:12]}")
    inputs = make_inputs(problem, InputKind.NORMAL, _SEED)
    packed = kernel.pack(inputs.w)
    operands: dict[str, Any] = {**inputs.operands}  # names and arrays: mypy sees `threads` in them
    y = np.empty((problem.m.high, problem.n), np.float32)
    kernel(inputs.x, packed, out=y, **operands)

    fault = find_error(compute_expected(problem, inputs), y)
    if fault is not None:
        print_message(f"Error: the result is wrong: {fault}.")
        raise typer.Exit(1)
    print_line("checked against NumPy in float64: every element is within its error bound")

    calls = 0
    begin_ns = time.perf_counter_ns()
    while (elapsed_ns := time.perf_counter_ns() - begin_ns) < _TIMED_S * 1e9:
        kernel(inputs.x, packed, out=y, **operands)
        calls += 1
    call_ns = elapsed_ns / calls
    rate = problem.flop(problem.m.high) / call_ns
    print_line(f"called from Python: {time_text(call_ns)} a call, {rate:.1f} GFLOP/s")


@contextmanager
def _service(database_url: str) -> Iterator[str]:
    """Run the service in a child process, at a Unix socket of its own; yield its address."""
    with scratch_folder("gemm-tuner-quickstart-") as folder:
        path = folder / "service.sock"
        ours = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
        with subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "gemm_tuner"),
                *("serve", "--socket", str(path), "--workers", "0"),
            ],
            # Not an argument: a URL may hold a password, and arguments can be read by everyone.
            env={**ours, "GEMM_TUNER_DB": database_url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                _wait_until_ready(path, child)
                yield f"unix:{path}"
            finally:
                child.terminate()


def _wait_until_ready(path: Path, child: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        while child.poll() is None and time.monotonic() < deadline_s:
            with suppress(httpx.TransportError):
                if path.exists() and client.get("http://localhost/readyz").is_success:
                    return
            time.sleep(0.05)
    child.terminate()
    assert child.stderr is not None
    said = " ".join(child.stderr.read().split())
    raise ServiceUnreachable(
        f"the service did not become ready and said {said!r}; "
        'make "gemm-tuner serve" work, then run quickstart again.'
    )
