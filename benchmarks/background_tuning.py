"""Measure how much a program's calls slow down while a worker tunes beside it.

    python benchmarks/background_tuning.py [--rounds 5] [--budget 15] [--pin-worker]

A program calls a library's kernel of 64x256x256 on one CPU, as fast as it can. A worker with a new
database, as `gemm-tuner serve` starts it, tunes a new problem in each round, on the other CPUs if
it is to be pinned, else wherever the system lets it run. While the job runs, calls are counted in
windows of half a second: in every other one the worker and all that it started stand still. So each
window is compared with its neighbour, and a core whose speed changes by itself changes both.
Printed is how many calls fewer there are beside the job, for each round and for all; the exit code
is 1 if that is more than 5 %. At least two CPUs are needed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database

CALLED = Problem.parse("f32 64x256x256 nk none")
WINDOW_S = 0.5
FEWEST_PAIRS = 4
MOST_SLOWER = 0.05
PATIENCE_S = 120.0


def call(connection: Connection, cpu: int) -> None:
    """Be the program: for each request, call for so many seconds, and answer calls a second."""
    os.sched_setaffinity(0, {cpu})
    kernel = FallbackKernel(problem=CALLED, reason="", threads=1)
    generator = np.random.default_rng(1)
    x = generator.standard_normal((CALLED.m.high, CALLED.k)).astype(np.float32)
    w = generator.standard_normal((CALLED.n, CALLED.k)).astype(np.float32)
    packed, y = kernel.pack(w), np.empty((CALLED.m.high, CALLED.n), np.float32)
    with suppress(EOFError):  # nobody asks any more
        while True:
            seconds = connection.recv()
            calls, begin_s = 0, time.perf_counter()
            while (spent_s := time.perf_counter() - begin_s) < seconds:
                for _call in range(50):
                    kernel(x, packed, out=y)
                calls += 50
            connection.send(calls / spent_s)


def family(process: int) -> Iterator[int]:
    """Yield a process and all that it and they have started, by number, parents first."""
    yield process
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


@contextmanager
def standing_still(process: int) -> Iterator[None]:
    """Stop a process, and all that it has started, meanwhile."""
    stopped: dict[int, None] = {}
    try:
        for _ in range(2):  # a child that was being started is met in the second round
            for one in family(process):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGSTOP)
                    stopped[one] = None
        yield
    finally:
        for one in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)


class Beside:
    """A program and a worker on one machine."""

    def __init__(self, program: Connection, jobs: Jobs, worker: int) -> None:
        self.program = program
        self.jobs = jobs
        self.worker = worker

    def window(self) -> float:
        """Return how many calls a second the program makes now."""
        self.program.send(WINDOW_S)
        rate: float = self.program.recv()
        return rate

    def round(self, number: int, budget_s: float) -> list[tuple[float, float]]:
        """Return pairs of calls a second, while a job stands still and while it runs."""
        job, _is_new = self.jobs.submit(
            Problem.parse(f"f32 {32 + number}x128x128 nk bias+relu"),
            class_key=detect_cpu().class_key,
            context=ExecutionContext(),
            budget_s=budget_s,
            priority=0,
            owner="benchmark",
            idempotency_key=None,
            now=datetime.now(UTC),
        )
        deadline_s = time.monotonic() + PATIENCE_S
        while self.now(job).state is JobState.WAITING:
            if time.monotonic() > deadline_s:
                sys.exit("The worker did not begin: other work keeps this machine busy.")
            time.sleep(0.1)
        pairs = []
        while self.now(job).state is JobState.RUNNING:
            with standing_still(self.worker):
                alone = self.window()
            pairs.append((alone, self.window()))
        if len(pairs) <= FEWEST_PAIRS:
            sys.exit(f"The job was over too soon: {self.now(job).detail}")
        return pairs[:-1]  # the last window may be after its end

    def now(self, job: Job) -> Job:
        """Return a job as it is now."""
        found = self.jobs.get(job.id)
        assert found is not None
        return found


def main() -> int:
    """Run the rounds, and return the exit code."""
    parser = argparse.ArgumentParser(description="How much tuning slows a program down beside it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of each job")
    parser.add_argument("--pin-worker", action="store_true", help="keep it off the program's CPU")
    arguments = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        sys.exit("Only one CPU is usable; at least two are needed.")
    of_program, others = usable[0], usable[1:]
    ours, theirs = get_context("spawn").Pipe()
    program = get_context("spawn").Process(target=call, args=(theirs, of_program), daemon=True)
    program.start()
    theirs.close()  # so that the program notices when this process ends
    with TemporaryDirectory(prefix="gemm-tuner-beside-") as folder:
        url = f"sqlite:///{Path(folder) / 'store.sqlite3'}"
        jobs = Jobs(open_database(url))
        pinned = ("taskset", "--cpu-list", ",".join(map(str, others)))
        command = (sys.executable, "-m", "gemm_tuner", "worker")
        worker = subprocess.Popen(
            [*pinned, *command] if arguments.pin_worker else command,
            env={**os.environ, "GEMM_TUNER_DB": url},
            stderr=subprocess.DEVNULL,
        )
        try:
            beside = Beside(ours, jobs, worker.pid)
            beside.window()
            pairs: list[tuple[float, float]] = []
            for number in range(arguments.rounds):
                pairs += (these := beside.round(number, arguments.budget))
                print(f"round {number + 1}: {summary(these)}", flush=True)
        finally:
            worker.terminate()
            worker.wait()
    ours.close()
    program.join()
    where = "on other CPUs" if arguments.pin_worker else "wherever it is scheduled"
    print(f"all, worker {where}: {summary(pairs)}")
    return int(slower(pairs) > MOST_SLOWER)


def slower(pairs: Sequence[tuple[float, float]]) -> float:
    """Return what share of the program's calls is missing beside a job."""
    return 1 - sum(beside for _alone, beside in pairs) / sum(alone for alone, _beside in pairs)


def summary(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the calls a second of both kinds of windows, and what that makes."""
    alone, beside = (sum(kind) / len(pairs) for kind in zip(*pairs, strict=True))
    return (
        f"{alone:.0f} calls/s alone, {beside:.0f} beside a job in {len(pairs)} pairs of windows: "
        f"{100 * slower(pairs):+.1f} % slower"
    )


if __name__ == "__main__":
    sys.exit(main())
