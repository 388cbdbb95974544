"""Measure how much a program's calls slow down while a worker tunes beside it.

    python benchmarks/background_tuning.py [--rounds 5] [--budget 15] [--pin-worker]

A program calls a library's kernel of 64x256x256 on one CPU, as fast as it can. A worker with a new
database, as `gemm-tuner serve` starts it, tunes a new problem in each round, on the other CPUs if
it is to be pinned, else wherever the system lets it run. Each round counts calls in windows of one
second, before the job and while it runs. It prints calls a second and the slow-down of each round,
and exits with 1 if their median is above 5 %. At least two CPUs and a calm machine are needed.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.database import open_database
from gemm_tuner.store.jobs import Jobs

CALLED = Problem.parse("f32 64x256x256 nk none")
WINDOW_S = 1.0
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


class Beside:
    """A program and a worker on one machine."""

    def __init__(self, program: Connection, jobs: Jobs) -> None:
        self.program = program
        self.jobs = jobs

    def window(self) -> float:
        """Return how many calls a second the program makes now."""
        self.program.send(WINDOW_S)
        rate: float = self.program.recv()
        return rate

    def round(self, number: int, budget_s: float) -> tuple[float, float]:
        """Return the calls a second without and with a job that runs."""
        alone = [self.window() for _window in range(max(3, round(budget_s / 2)))]
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
        beside = []
        while self.now(job).state is JobState.RUNNING:
            beside.append(self.window())
        if len(beside) < 4:
            sys.exit(f"The job was over too soon: {self.now(job).detail}")
        return median(alone), median(beside[:-1])  # the last window may be after its end

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
            beside = Beside(ours, jobs)
            beside.window()
            slower = []
            for number in range(arguments.rounds):
                alone, together = beside.round(number, arguments.budget)
                slower.append(1 - together / alone)
                print(
                    f"round {number + 1}: {alone:.0f} calls/s alone, {together:.0f} beside a job: "
                    f"{100 * slower[-1]:+.1f} % slower",
                    flush=True,
                )
        finally:
            worker.terminate()
            worker.wait()
    ours.close()
    program.join()
    where = "on other CPUs" if arguments.pin_worker else "wherever it is scheduled"
    print(f"worker {where}: {100 * median(slower):+.1f} % slower (median of rounds)")
    return int(median(slower) > MOST_SLOWER)


if __name__ == "__main__":
    sys.exit(main())
