"""Measure everything that docs/performance.md and its tables hold, step by step, and write them.

    python benchmarks/publish.py RESULTS [--proofs] [--plan] [--only WHAT ...] [--budget SECONDS]

On any CPU, also one that gemm-tuner has not seen: each step sweeps the layers of a file on one or
on all threads, times the winners beside the libraries that are installed, and writes the report of
this CPU and the front page anew from all that is in the folder RESULTS. In the end the model that
ranks candidates is held against what was measured (model.txt there), and the records go to
tuning_db/. `--proofs` first runs the tests of the kernels and of the emulator; on a CPU with AMX,
they run without the emulator, and compare the CPU with the model that it is tested against.

What has ended is not run again, so the same command goes on after an interruption; log.csv in
RESULTS has the time and exit code of each command. The exit code is not 0 if a command failed or
the report found something wrong.
"""

import argparse
import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import performance
from publish_steps import BUDGET_S, PYTEST, ROOT, SHAPES, Command, Plan, Step, steps_for

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.cores import CORES

REFUTED = 1  # the exit code of bench where a verdict does not hold, which is a result too
STOPPED = 130  # as a shell tells Ctrl-C
_MAKES = r"epyc|ryzen|threadripper|xeon|core|atom"


def main(plan: Plan, *, name: str, docs: Path, is_plan_only: bool) -> int:
    """Run the rest of the plan for the CPU called `name` and return the exit code."""
    print_plan(plan)
    if is_plan_only:
        return 0
    for folder in (plan.results, plan.records.parent):
        folder.mkdir(parents=True, exist_ok=True)
    proofs, *steps, last = plan.pieces().values()
    has_ended = run_all(plan.results, plan.left_of(proofs))
    code = 0
    for commands in steps:
        has_ended |= run_all(plan.results, plan.left_of(commands))
        code = performance.write_reports(plan.results, name, docs)
    has_ended |= run_all(plan.results, last if has_ended else plan.left_of(last))
    failed = [command for command, is_well in has_ended.items() if not is_well]
    for command in failed:
        print(f"Failed: {command.text}; see messages.txt, then run this again.")
    return 1 if failed else code


def print_plan(plan: Plan) -> None:
    """Print the remaining steps and how long they may take."""
    total_s = 0.0
    for name, commands in plan.pieces().items():
        left = plan.left_of(commands)
        piece_s = sum(command.expected_s for command in left)
        total_s += piece_s
        print(f"{name:18}{piece_s / 60:6.1f} min   commands left: {len(left)}")
    print(f"{'in all':18}{total_s / 60:6.1f} min", flush=True)


def run_all(results: Path, commands: list[Command]) -> dict[Command, bool]:
    """Run commands, also after one that failed, and return whether each ended well."""
    for command in commands:
        (results / command.output).unlink(missing_ok=True)
    return {command: run(results, command) for command in commands}


def run(results: Path, command: Command) -> bool:
    """Run a command and keep its output if it ended well; return whether it did."""
    print(f"{time.strftime('%H:%M')} {command.text}", flush=True)
    begin_s = time.monotonic()
    unfinished = results / f"{command.output}.unfinished"
    environment = os.environ | {
        "GEMM_TUNER_DB": f"sqlite:///{(results / 'records.sqlite3').resolve()}"
    }
    with unfinished.open("w") as output, (results / "messages.txt").open("a") as messages:
        code = subprocess.run(
            [sys.executable, "-m", command.program, *command.arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=messages,
            check=False,
        ).returncode
    minutes = (time.monotonic() - begin_s) / 60
    is_kept = code == 0 or (code == REFUTED and holds_rows(unfinished))
    with (results / "log.csv").open("a", newline="") as log:
        csv.writer(log).writerow([command.output, code, f"{minutes:.2f}", command.text])
    print(f"      {minutes:.1f} min, exit code {code}", flush=True)
    if is_kept:
        unfinished.rename(results / command.output)
        keep_text(results / performance.COMMANDS, command.text)
    return is_kept


def holds_rows(path: Path) -> bool:
    """Return whether a file is a result of bench with at least one layer."""
    try:
        return bool(json.loads(path.read_text())["layers"])
    except (ValueError, KeyError, TypeError):
        return False


def keep_text(path: Path, text: str) -> None:
    """Add a line to a file, after it was taken out from where it stood before."""
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("\n".join([*(line for line in lines if line != text), text]) + "\n")


def cpu_name(cpu: Cpu) -> str:
    """Return the name of a CPU's report: its make and its core, such as `epyc-zen4`."""
    make = re.search(_MAKES, cpu.brand.lower())
    core = next((name for name, core in CORES.items() if core.is_of(cpu)), None)
    words = (make[0] if make else cpu.vendor.lower(), core or f"{cpu.family:x}-{cpu.model:x}")
    return "-".join(words).replace("_", "-")


def chosen_steps(threads: int, only: list[str]) -> dict[int, Step]:
    """Return the steps that `only` names by their names or types, or all, by their places.

    Raises:
        ValueError: a word names no step.
    """
    steps = dict(enumerate(steps_for(threads), start=1))
    known = dict.fromkeys(word for step in steps.values() for word in (step.name, step.dtype))
    for word in only:
        if word not in known:
            raise ValueError(f"--only {word!r} is no step; use some of: {', '.join(known)}.")
    return {
        place: step
        for place, step in steps.items()
        if not only or {step.name, step.dtype} & {*only}
    }


def plan_of(asked: argparse.Namespace) -> Plan:
    """Return the plan that was asked for.

    Raises:
        ValueError: a step, a file or what the proofs need is not there, or the name is another
            CPU's.
    """
    performance.check_name(asked.name, detect_cpu().exact_key, asked.into / "docs")
    shapes = asked.shapes.resolve()
    if not shapes.exists():
        raise ValueError(f"--shapes {asked.shapes} is not there; give a CSV file or a folder.")
    if asked.proofs and importlib.util.find_spec(PYTEST) is None:
        raise ValueError(
            "the proofs need pytest, which is not installed; pip install '.[all,dev]', or leave "
            "out --proofs: a sweep proves each candidate too."
        )
    return Plan(
        results=asked.results,
        steps=chosen_steps(asked.threads, asked.only),
        records=(asked.into / "tuning_db" / f"{detect_cpu().exact_key}.jsonl").resolve(),
        budget_s=asked.budget,
        shapes=shapes.relative_to(ROOT) if shapes.is_relative_to(ROOT) else shapes,
        has_proofs=asked.proofs,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a folder, which is made if it is not there")
    parser.add_argument("--proofs", action="store_true", help="prove the kernels first, by pytest")
    parser.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WHAT", help="steps or types, such as f32-1 bf16"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds to sweep a layer, all regimes"
    )
    parser.add_argument(
        "--threads", type=int, default=usable_cpus(), help="besides one; by default all"
    )
    parser.add_argument(
        "--shapes",
        type=Path,
        default=ROOT / SHAPES,
        help="a file of layers for all steps, or a folder with a file for each kind of step",
    )
    parser.add_argument(
        "--name", default=cpu_name(detect_cpu()), help="the CPU in the names of its reports"
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT, help="the folder whose docs/ and tuning_db/ are written"
    )
    return parser


if __name__ == "__main__":
    arguments = parser()
    asked = arguments.parse_args()
    try:
        sys.exit(
            main(plan_of(asked), name=asked.name, docs=asked.into / "docs", is_plan_only=asked.plan)
        )
    except ValueError as error:
        arguments.error(str(error))
    except KeyboardInterrupt:
        print("Stopped; run the same command again to go on.", file=sys.stderr)
        sys.exit(STOPPED)
