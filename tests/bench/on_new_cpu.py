"""Prove and measure everything on a CPU that gemm-tuner has not seen, in one command.

    python tests/bench/on_new_cpu.py RESULTS [--shapes FILE.csv] [--budget SECONDS] [--dtypes …]

On a CPU with AMX this runs the AMX kernels without the emulator, compares the instructions with the
model that the emulator is tested against, sweeps the public layers on one and on all cores beside
oneDNN, times the winners again, holds the ranking model against what was measured, and writes the
records to tuning_db/ to be committed. Each command's output is a file in RESULTS; what has ended is
not run again. The exit code is 1 if a command failed.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.runtime.cpus import usable_cpus
from gemm_tuner.runtime.detect import detect_cpu

ROOT = Path(__file__).parents[2]
LAYERS = Path("tests") / "bench" / "layers.csv"
PROOFS = [f"tests/kernels/test_{name}.py" for name in ("emulator", "amx", "fp16", "machine_code")]
GEMM_TUNER = [sys.executable, "-m", "gemm_tuner"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the file that its output goes to."""

    output: str
    words: tuple[str, ...]


def steps(database: str, *, shapes: Path, budget_s: float, dtypes: list[str]) -> Iterator[Step]:
    """Yield what is to be done, in order."""
    yield Step(output="cpu.json", words=(*GEMM_TUNER, "cpu", "--json"))
    proofs = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *PROOFS)
    yield Step(output="proofs.txt", words=(sys.executable, *proofs))
    for threads in sorted({1, usable_cpus()}):
        for dtype in dtypes:
            layers = ("--shapes", str(shapes), "--dtype", dtype, "--threads", str(threads))
            store = ("--db", database)
            budget = ("--regime", "both", "--budget", f"{budget_s:g}s")
            name = f"{dtype}-{threads}"
            yield Step(
                output=f"{name}-sweep.txt", words=(*GEMM_TUNER, "sweep", *layers, *budget, *store)
            )
            yield Step(
                output=f"{name}-bench.json",
                words=(*GEMM_TUNER, "bench", *layers, "--baseline", "onednn", "--json", *store),
            )
    yield Step(
        output="model.json", words=(*GEMM_TUNER, "model", "report", "--json", "--db", database)
    )
    records = ROOT / "tuning_db" / f"{detect_cpu().exact_key}.jsonl"
    yield Step(
        output="records.txt",
        words=(*GEMM_TUNER, "records", "export", "--finals", str(records), "--db", database),
    )


def main(results: Path, *, shapes: Path, budget_s: float, dtypes: list[str]) -> int:
    """Run what is left and return the exit code."""
    results.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{(results / 'records.sqlite3').resolve()}"
    failed = []
    for step in steps(database, shapes=shapes, budget_s=budget_s, dtypes=dtypes):
        output = results / step.output
        if output.exists():
            continue
        print(f"{step.output}: {' '.join(step.words[1:])}", flush=True)
        unfinished = results / f"{step.output}.unfinished"
        with unfinished.open("w") as stream:
            code = subprocess.run(step.words, cwd=ROOT, stdout=stream, check=False).returncode
        is_refuted = code == 1 and "bench" in step.words  # a verdict does not hold: a result too
        if code == 0 or is_refuted:
            unfinished.rename(output)
        else:
            failed.append(step.output)
            print(f"{step.output} failed with exit code {code}; see {unfinished}.")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, help="a folder, which is made if it is not there")
    parser.add_argument("--shapes", type=Path, default=LAYERS, help="the layers to sweep")
    parser.add_argument("--budget", type=float, default=12.0, help="seconds to sweep a layer")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "int8"])
    asked = parser.parse_args()
    sys.exit(main(asked.results, shapes=asked.shapes, budget_s=asked.budget, dtypes=asked.dtypes))
