"""Turn what `gemm-tuner bench --shapes FILE --json` printed, once for each dtype, into a report.

    gemm-tuner sweep --shapes FILE --regime both
    gemm-tuner bench --shapes FILE --regime both --json > f32.json
    gemm-tuner sweep --shapes FILE --dtype bf16 --budget 8s
    gemm-tuner bench --shapes FILE --dtype bf16 --json > bf16.json
    python tests/bench/performance.py FILE f32.json bf16.json > docs/performance.md
    python tests/bench/plot.py f32.json docs/performance.svg

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


def main(shapes: Path, results: Iterable[Path]) -> int:
    """Print the report and return the exit code."""
    with shapes.open(newline="") as file:
        layers = list(csv.DictReader(file))
    rows: list[Row] = [row for path in results for row in json.loads(path.read_text())["layers"]]
    baselines = sorted({row["baseline"] for row in rows})
    onednn = next(name for name in baselines if name.startswith(BASELINE))
    others = [name for name in baselines if name != onednn]

    print_head(onednn, others)
    for types in dict.fromkeys(types_of(row) for row in rows):
        for regime in Regime:
            of_section = [
                row for row in rows if types_of(row) == types and row["regime"] == regime.value
            ]
            if of_section:
                print_section(f"{types}, {regime.value}", layers, of_section, onednn)
                for other in others:
                    print_other(of_section, other)
    refuted = [f"{row['problem']} ({row['regime']})" for row in rows if row["refuted"]]
    print(f"Verdicts `tuned` that this separate run refuted: {', '.join(refuted) or 'none'}.")
    return 1 if refuted else 0


def types_of(row: Row) -> str:
    """Return the types of a row's problem, such as `f32`."""
    types: str = row["problem"].split()[0]
    return types


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
        f"footprint; cold weights are read from a block of eight times the last-level cache.\n"
    )
    print("A layer for which no kernel is served counts as 1, also where oneDNN was faster.\n")
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


def print_section(
    title: str, layers: Iterable[dict[str, str]], rows: Iterable[Row], onednn: str
) -> None:
    """Print a table, the layers where the kernel is slowest beside oneDNN first."""
    timed = {row["name"]: row for row in rows if row["baseline"] == onednn}
    ratios = {layer["name"]: 1.0 for layer in layers}
    ratios |= {name: row["ratio"]["median"] for name, row in timed.items()}
    print(f"## {title}\n")
    print(f"Geometric mean of the ratio to {onednn}: **{geometric_mean(ratios.values()):.3f}**\n")
    columns = COLUMNS.format(onednn).split("|")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for layer in sorted(layers, key=lambda layer: ratios[layer["name"]]):
        sizes = f"{layer['m']} x {layer['n']} x {layer['k']}"
        row = timed.get(layer["name"])
        if row is None:
            unmeasured = (layer["name"], sizes, layer["epilogue"], "", "", "", "", "", "1")
            print(f"| {' | '.join(unmeasured)} | no kernel served |")
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


def print_other(rows: Iterable[Row], baseline: str) -> None:
    """Print the geometric mean of the ratio to another baseline, if it computes these types."""
    ratios = [row["ratio"]["median"] for row in rows if row["baseline"] == baseline]
    if ratios:
        mean = geometric_mean(ratios)
        print(f"Beside {baseline} (product only, without the epilogue): {mean:.3f}\n")


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
