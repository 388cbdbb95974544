"""Measure everything that docs/performance.md holds, step by step, and write it.

    python tests/bench/publish.py RESULTS [--plan] [--only STEP ...] [--budget SECONDS]

Each step sweeps the layers of a file, times the winners, and writes the report anew from all that
is in the folder RESULTS. What has ended is not run again, so the same command goes on after an
interruption; log.csv there has the time and exit code of each command. The exit code is not 0 if a
command failed or the report found something wrong.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import performance

ROOT = performance.ROOT
SHAPES = Path("tests") / "bench"
REPORT = Path("docs") / "performance.md"
ALL = "layers.csv"
LARGE = "layers_large.csv"
FEW = "layers_few.csv"
WEIGHT_ONLY = "layers_weight_only.csv"
PLOT = "performance.svg"

# The longest time to sweep a layer, both regimes together, and the part of it for a step that has
# winners of an earlier one to start from, or few layers.
BUDGET_S = 10.0
SHORT = 0.8
# What a sweep takes for a layer besides its budget, and a bench for a layer and regime, in seconds:
# with all libraries, or with few. On an AMD EPYC (Zen 5, 2 cores), November 2026.
BESIDES_BUDGET_S = 1.2
ALL_LIBRARIES_S = 5.5
FEW_LIBRARIES_S = 2.2
REFUTED = 1  # the exit code of bench where a verdict does not hold, which is a result too


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run of `gemm-tuner bench`; without baselines it is beside all that are installed."""

    name: str
    regime: str
    baselines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A sweep of some layers, and the runs of bench that time its winners."""

    name: str
    shapes: str
    dtype: str
    benches: tuple[Bench, ...]
    threads: int = 1
    groups: str = ""

    def layer_arguments(self, shapes: Path) -> list[str]:
        """Return what sweep and bench are told about the layers; their files are in `shapes`."""
        groups = ["--groups", self.groups] if self.groups else []
        threads = ["--threads", str(self.threads)] if self.threads > 1 else []
        return ["--shapes", str(shapes / self.shapes), "--dtype", self.dtype, *groups, *threads]

    @property
    def regime(self) -> str:
        """Return the regimes that the runs of bench need."""
        regimes = {bench.regime for bench in self.benches}
        return regimes.pop() if len(regimes) == 1 else "both"


HOT = Bench(name="hot", regime="hot")
COLD = Bench(name="cold", regime="cold_weights", baselines=("onednn",))
HOT_OF_2 = Bench(name="hot", regime="hot", baselines=("onednn", "one-thread"))
COLD_OF_2 = Bench(name="cold", regime="cold_weights", baselines=("onednn", "one-thread"))
BOTH = Bench(name="both", regime="both", baselines=("onednn",))

# The most wanted first. Two threads come after one: their winners are compared with those of one.
# fmt: off
STEPS = (
    Step(name="f32-1",  shapes=ALL,   dtype="f32",  benches=(HOT, COLD)),
    Step(name="int8-1", shapes=ALL,   dtype="int8", benches=(HOT, COLD)),
    Step(name="bf16-1", shapes=ALL,   dtype="bf16", benches=(HOT, COLD)),
    Step(name="f32-2",  shapes=LARGE, dtype="f32",  benches=(HOT_OF_2, COLD_OF_2), threads=2),
    Step(name="f16",    shapes=FEW,   dtype="f16",  benches=(HOT,)),
    Step(name="w4",     shapes=WEIGHT_ONLY, dtype="bf16_s4", groups="128", benches=(BOTH,)),
    Step(name="w8",     shapes=WEIGHT_ONLY, dtype="f32_s8",  groups="128", benches=(BOTH,)),
    Step(name="int8-2", shapes=LARGE, dtype="int8", benches=(HOT_OF_2,), threads=2),
    Step(name="bf16-2", shapes=LARGE, dtype="bf16", benches=(HOT_OF_2,), threads=2),
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Command:
    """One call of gemm-tuner, its output in the file `output`, and how long it may take."""

    output: str
    arguments: tuple[str, ...]
    expected_s: float

    @property
    def text(self) -> str:
        """Return the command as one would type it."""
        return f"gemm-tuner {' '.join(self.arguments)} > {self.output}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, with what budget for each layer, and where everything is.

    `results` keeps what was measured, `shapes` has the files of layers, `report` is written.
    """

    results: Path
    steps: tuple[Step, ...]
    budget_s: float
    shapes: Path
    report: Path

    def commands_of(self, step: Step) -> Iterator[Command]:
        """Yield the sweep of a step, then its runs of bench."""
        with (ROOT / self.shapes / step.shapes).open(newline="") as file:
            layers = sum(1 for _layer in csv.DictReader(file))
        budget_s = self.budget_s if step.shapes == ALL else SHORT * self.budget_s
        name = f"{STEPS.index(step) + 1}-{step.name}"
        arguments = step.layer_arguments(self.shapes)
        yield Command(
            output=f"{name}-sweep.txt",
            arguments=(
                *("sweep", *arguments, "--regime", step.regime, "--budget", f"{budget_s:g}s"),
            ),
            expected_s=layers * (budget_s + BESIDES_BUDGET_S),
        )
        for bench in step.benches:
            baselines = [word for one in bench.baselines for word in ("--baseline", one)]
            plot = ["--plot", PLOT] if step is STEPS[0] and bench is HOT else []
            regimes = 2 if bench.regime == "both" else 1
            layer_s = FEW_LIBRARIES_S if bench.baselines else ALL_LIBRARIES_S
            yield Command(
                output=f"{name}-{bench.name}.json",
                arguments=(
                    *("bench", *arguments, "--regime", bench.regime, *baselines, "--json", *plot),
                ),
                expected_s=layers * regimes * layer_s,
            )

    def left_of(self, step: Step) -> list[Command]:
        """Return the commands of a step that have not ended yet."""
        return [one for one in self.commands_of(step) if not (self.results / one.output).exists()]


def main(plan: Plan, *, is_plan_only: bool) -> int:
    """Run what is left of the plan and return the exit code."""
    print_plan(plan)
    if is_plan_only:
        return 0
    plan.results.mkdir(parents=True, exist_ok=True)
    failed: list[Command] = []
    for step in plan.steps:
        failed += [command for command in plan.left_of(step) if not run(plan.results, command)]
        code, messages = write_report(plan)
    print(messages, file=sys.stderr, end="")
    for command in failed:
        print(f"Failed: {command.text}; see messages.txt, then run this again.")
    return 1 if failed else code


def print_plan(plan: Plan) -> None:
    """Print what is left to do and how long it may take."""
    total_s = 0.0
    for step in plan.steps:
        left = plan.left_of(step)
        step_s = sum(command.expected_s for command in left)
        total_s += step_s
        print(f"{step.name:8}{step_s / 60:6.1f} min   commands left: {len(left)}")
    print(f"{'in all':8}{total_s / 60:6.1f} min", flush=True)


def run(results: Path, command: Command) -> bool:
    """Run a command and keep its output if it ended well; return whether it did."""
    print(f"{time.strftime('%H:%M')} {command.text}", flush=True)
    begin_s = time.monotonic()
    unfinished = results / f"{command.output}.unfinished"
    environment = os.environ | {
        "GEMM_TUNER_DB": f"sqlite:///{(results / 'records.sqlite3').resolve()}"
    }
    words = [
        str((results / PLOT).resolve()) if word == PLOT else word for word in command.arguments
    ]
    with unfinished.open("w") as output, (results / "messages.txt").open("a") as messages:
        code = subprocess.run(
            [sys.executable, "-m", "gemm_tuner", *words],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=messages,
            check=False,
        ).returncode
    minutes = (time.monotonic() - begin_s) / 60
    is_sweep = command.output.endswith(".txt")
    is_kept = code == 0 or (code == REFUTED and not is_sweep and holds_rows(unfinished))
    with (results / "log.csv").open("a", newline="") as log:
        csv.writer(log).writerow([command.output, code, f"{minutes:.2f}", command.text])
    print(f"      {minutes:.1f} min, exit code {code}", flush=True)
    if is_kept:
        unfinished.rename(results / command.output)
        with (results / performance.COMMANDS).open("a") as kept:
            kept.write(f"{command.text}\n")
    return is_kept


def holds_rows(path: Path) -> bool:
    """Return whether a file is a result with at least one layer."""
    try:
        return bool(json.loads(path.read_text())["layers"])
    except (ValueError, KeyError):
        return False


def write_report(plan: Plan) -> tuple[int, str]:
    """Write the report and its picture; return the exit code and messages of performance.py."""
    report = subprocess.run(
        [sys.executable, performance.__file__, plan.results],
        capture_output=True,
        text=True,
        check=False,
    )
    if report.returncode in {0, performance.MISFIT}:
        plan.report.write_text(report.stdout)
    picture = plan.results / PLOT
    if picture.exists():
        shutil.copyfile(picture, plan.report.with_name(PLOT))
    return report.returncode, report.stderr


def parse_arguments() -> argparse.Namespace:
    """Return what was asked for."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a folder, which is made if it is not there")
    parser.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds to sweep a layer, all regimes"
    )
    parser.add_argument(
        "--shapes", type=Path, default=SHAPES, help="a folder with files of layers of these names"
    )
    parser.add_argument("--report", type=Path, default=ROOT / REPORT, help="what is written")
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse_arguments()
    chosen = Plan(
        results=asked.results,
        steps=tuple(step for step in STEPS if step.name in asked.only),
        budget_s=asked.budget,
        shapes=asked.shapes,
        report=asked.report,
    )
    sys.exit(main(chosen, is_plan_only=asked.plan))
