"""Compare weights of 8 and 4 bits with those of floats: tune each, then time all in alternation.

    python benchmarks/weight_only.py [M N K [BUDGET_S]]

It says how far it is, and prints the median time of a call on one thread with hot weights, how many
times as fast as f32 that is, and the kernel. The sizes are 1 x 4096 x 4096 by default; a budget is
for each kernel.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gemm_tuner import Problem, tune
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.domain.units import duration_text
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

TYPES = ("f32", "bf16", "f32_s8", "f32_u8", "bf16_s8", "f32_s4", "f32_u4", "bf16_s4", "bf16_u4")
GROUP = 128
ROUNDS = 31
SAMPLE_NS = 4_000_000
SEED = 1


@dataclass(slots=True, kw_only=True)
class Contestant:
    """The fastest kernel found for a problem, ready to be called."""

    problem: Problem
    candidate: str
    runner: KernelRunner
    weights: WeightCopies
    samples_ns: list[float] = field(default_factory=list)

    def sample(self, calls: int) -> float:
        """Return the time of one call, in ns, over some calls."""
        sample = self.runner.sample(self.weights.struct, warm_up_calls=1, timed_calls=calls)
        return int(sample.elapsed_ns) / calls


def main(m: int, n: int, k: int, budget_s: float) -> None:
    """Print how fast each kind of weights is."""
    with tempfile.TemporaryDirectory() as folder:
        db_url = f"sqlite:///{Path(folder) / 'weight_only.sqlite3'}"
        contestants: list[Contestant] = []
        begin_s = time.monotonic()
        for done, types in enumerate(TYPES):
            groups = f":g{GROUP}" if "_" in types else ""
            problem = Problem.parse(f"{types} {m}x{n}x{k} nk{groups}")
            each_s = (time.monotonic() - begin_s) / done if done else budget_s
            left = duration_text(each_s * (len(TYPES) - done))
            print_message(f"{problem.text}: tuning {done + 1} of {len(TYPES)}, {left} left")
            contestants.append(prepare(problem, budget_s, db_url))
        print_message(f"timing all together, {duration_text(racing_s(contestants))} left")
        race(contestants)
    f32_ns = statistics.median(contestants[0].samples_ns)
    for one in contestants:
        median_ns = statistics.median(one.samples_ns)
        print(
            f"{one.problem.text:44} {median_ns / 1e3:9.1f} us {f32_ns / median_ns:6.2f} x  "
            f"{one.candidate}"
        )


def fastest_kernel(problem: Problem, budget_s: float, db_url: str) -> Kernel:
    """Tune a problem and return the fastest of its kernels, whatever the verdict."""
    tuned = tune(problem, budget_s=budget_s, db_url=db_url)
    trials = [trial for trial in tuned.finalists if trial.measurement and trial.artifact]
    best = min(trials, key=lambda trial: trial.measurement.candidate.median_ns)  # type: ignore[union-attr]  # filtered above
    assert best.artifact is not None
    binary = Repository(open_database(db_url)).binary(best.artifact.sha256)
    assert binary is not None
    return load_kernel(binary, artifact=best.artifact, cpu=detect_cpu())


def prepare(problem: Problem, budget_s: float, db_url: str) -> Contestant:
    """Return the fastest kernel of a problem, ready to be called."""
    kernel = fastest_kernel(problem, budget_s, db_url)
    workload = make_workload(problem, make_inputs(problem, InputKind.NORMAL, SEED), threads=1)
    timer = build_drivers(find_toolchain(), detect_cpu()).timer
    runner = KernelRunner(kernel.native, workload, timer)
    return Contestant(
        problem=problem,
        candidate=kernel.candidate.text,
        runner=runner,
        weights=WeightCopies(runner, 1, SEED),
    )


def racing_s(contestants: list[Contestant]) -> float:
    """Return about how long the race takes, in seconds."""
    return ROUNDS * sum(max(SAMPLE_NS, one.sample(2)) for one in contestants) / 1e9


def race(contestants: list[Contestant]) -> None:
    """Sample all in turn, so that what disturbs the machine disturbs all."""
    calls = [max(1, int(SAMPLE_NS / one.sample(2))) for one in contestants]
    for _round in range(ROUNDS):
        for one, count in zip(contestants, calls, strict=True):
            one.samples_ns.append(one.sample(count))


if __name__ == "__main__":
    given = sys.argv[1:]
    rows, columns, depth = (int(size) for size in given[:3] or ("1", "4096", "4096"))
    main(rows, columns, depth, float(given[3]) if len(given) > 3 else 5.0)
