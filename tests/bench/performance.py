"""Turn what `gemm-tuner bench --shapes FILE --regime both --json` printed into a report.

    gemm-tuner sweep --shapes FILE --regime both --budget 40s
    gemm-tuner bench --shapes FILE --regime both --json > bench.json
    python tests/bench/performance.py FILE bench.json > docs/performance.md
    python tests/bench/plot.py bench.json docs/performance.svg

The report compares each layer with oneDNN, its baseline; a layer without a kernel counts as 1.
The exit code is 1 if a verdict `tuned` was refuted.
"""

import csv
import json
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import Regime
from gemm_tuner.runtime.detect import detect_cpu

BASELINE = "onednn"
COLUMNS = "Layer|m x n x k|Epilogue|Kernel|Time|GFLOP/s|Of roofline|{}|Ratio|Verdict"

Row = dict[str, Any]


def main(shapes: Path, results: Path) -> int:
    """Print the report and return the exit code."""
    with shapes.open(newline="") as file:
        layers = list(csv.DictReader(file))
    rows: list[Row] = json.loads(results.read_text())["layers"]
    baselines = sorted({row["baseline"] for row in rows})
    onednn = next(name for name in baselines if name.startswith(BASELINE))
    others = [name for name in baselines if name != onednn]

    print_head(onednn, others)
    for regime in Regime:
        timed = {
            row["name"]: row
            for row in rows
            if row["regime"] == regime.value and row["baseline"] == onednn
        }
        if timed:
            print_regime(regime, layers, timed, onednn)
            for other in others:
                print_other(regime, rows, other)
    refuted = [row["name"] for row in rows if row["refuted"]]
    print(f"Verdicts `tuned` that this separate run refuted: {', '.join(refuted) or 'none'}.")
    return 1 if refuted else 0


def print_head(onednn: str, others: Iterable[str]) -> None:
    """Print what was measured, and under which conditions."""
    cpu = detect_cpu()
    print("# Performance\n")
    print(
        f"Stored winners of `gemm-tuner sweep`, timed again by `gemm-tuner bench` in fresh "
        f"processes: 30 interleaved pairs with {onednn}, weights packed and epilogue fused on both "
        f"sides, one thread. Times are medians; the ratio is the median of the paired ratios of "
        f"speed, above 1 where the kernel is faster. Roofline: the larger of flop over the peak of "
        f"a multiply-add loop timed in alternation, and bytes over the read bandwidth at that "
        f"footprint.\n"
    )
    print(f"- CPU: {cpu.brand}, family {cpu.family:#x}, model {cpu.model:#x}, {cpu.exact_key}")
    print(f"- {cpu.physical_cores} cores of a shared virtual machine, Linux {platform.release()}")
    print(f"- compiler: {find_toolchain().text}; date: {datetime.now(UTC):%Y-%m-%d}")
    print(f"- also timed: {', '.join(others) or 'nothing else'}\n")
    print("Reproduce:\n")
    print("```sh")
    print(
        "\n".join(line.strip() for line in (__doc__ or "").splitlines() if line.startswith("    "))
    )
    print("```\n")
    print("![Speed of each kernel over oneDNN](performance.svg)\n")


def print_regime(
    regime: Regime, layers: Iterable[dict[str, str]], timed: dict[str, Row], onednn: str
) -> None:
    """Print the table of one regime, the layers where the kernel is slowest beside oneDNN first."""
    ratios = {layer["name"]: 1.0 for layer in layers}
    ratios |= {name: row["ratio"]["median"] for name, row in timed.items()}
    print(f"## {regime.value}\n")
    print(f"Geometric mean of the ratio to {onednn}: **{geometric_mean(ratios.values()):.3f}**\n")
    columns = COLUMNS.format(onednn).split("|")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for layer in sorted(layers, key=lambda layer: ratios[layer["name"]]):
        sizes = f"{layer['m']} x {layer['n']} x {layer['k']}"
        row = timed.get(layer["name"])
        if row is None:
            print(f"| {layer['name']} | {sizes} | {layer['epilogue']} |{' |' * 5} 1 | baseline |")
            continue
        flop = 2 * int(layer["m"]) * int(layer["n"]) * int(layer["k"])
        cells = (
            layer["name"],
            sizes,
            layer["epilogue"],
            f"`{row['candidate']}`",
            time_text(row["median_ns"]),
            f"{flop / row['median_ns']:.0f}",
            f"{row['share_of_roofline']:.0%}",
            time_text(row["baseline_median_ns"]),
            f"{row['ratio']['median']:.3f}",
            row["decision"] + (", refuted" if row["refuted"] else ""),
        )
        print(f"| {' | '.join(cells)} |")
    print()


def print_other(regime: Regime, rows: Iterable[Row], baseline: str) -> None:
    """Print the geometric mean of the ratio to another baseline."""
    ratios = [
        row["ratio"]["median"]
        for row in rows
        if row["regime"] == regime.value and row["baseline"] == baseline
    ]
    print(f"Beside {baseline} (product only, without the epilogue): {geometric_mean(ratios):.3f}\n")


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
