"""Turn what `gemm-tuner bench --json` printed into a report. In tests/bench:

    gemm-tuner sweep --shapes layers.csv --regime both --budget 20s
    gemm-tuner sweep --shapes layers.csv --regime both --budget 12s --dtype int8
    gemm-tuner sweep --shapes layers.csv --regime both --budget 12s --dtype bf16
    gemm-tuner bench --shapes layers.csv --json --plot ../../docs/performance.svg > f32.json
    gemm-tuner bench --shapes layers.csv --json --dtype int8 > int8.json
    gemm-tuner bench --shapes layers.csv --json --dtype bf16 --baseline onednn > bf16.json
    python performance.py layers.csv f32.json int8.json bf16.json > ../../docs/performance.md

The report compares each layer with every baseline that was timed in the same rounds. Why a baseline
is faster is for a person to say, in docs/performance-notes.json: a text by types, regime and layer,
such as "f32 hot cube_2048". The exit code is 1 if a verdict `tuned` was refuted.
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

NOTES = Path(__file__).parents[2] / "docs" / "performance-notes.json"
BEFORE = ("Layer", "m x n x k", "Epilogue", "Kernel", "Time", "GFLOP/s", "Of roofline")
AFTER = ("Beside the best", "Verdict", "Why a baseline is faster")

Row = dict[str, Any]


def main(shapes: Path, results: Iterable[Path]) -> int:
    """Print the report and return the exit code."""
    with shapes.open(newline="") as file:
        layers = list(csv.DictReader(file))
    documents = [json.loads(path.read_text()) for path in results]
    rows: list[Row] = [row for document in documents for row in document["layers"]]
    notes: dict[str, str] = json.loads(NOTES.read_text()) if NOTES.exists() else {}

    print_head(documents, rows)
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(section_of(row), []).append(row)
    for title, of_section in sections.items():
        print_section(title, layers, of_section, notes)
    refuted = [f"{row['problem']} ({row['regime']})" for row in rows if row["refuted"]]
    unchecked = sum(row["refuted"] is None for row in rows)
    print(
        f"Verdicts `tuned` that this separate run refuted: {', '.join(refuted) or 'none'}; "
        f"not checked, because their baseline was not timed: {unchecked}."
    )
    return 1 if refuted else 0


def section_of(row: Row) -> str:
    """Return where a row stands, such as `f32 hot` or `f32 hot, 2 threads`."""
    types = row["problem"].split()[0]
    threads = "" if row["threads"] == 1 else f", {row['threads']} threads"
    return f"{types} {row['regime']}{threads}"


def print_head(documents: Iterable[dict[str, Any]], rows: Sequence[Row]) -> None:
    """Print what was measured, and under which conditions."""
    product_only = {
        one["baseline"] for row in rows for one in row["baselines"] if one["computes"] == "product"
    }
    print("# Performance\n")
    print(
        "Best kernels of `gemm-tuner sweep`, timed again by `gemm-tuner bench` in fresh processes: "
        "at most 30 interleaved rounds with the baselines that a section names, each at its best, "
        "weights packed and epilogue fused where the library can. Times are medians; a ratio is "
        "the median of the paired ratios of speed, above 1 where the kernel is faster. Roofline: "
        "the larger of flop over the peak of a multiply-add loop timed in alternation, and bytes "
        "over the rate of a plain read loop at that footprint, which a kernel may exceed a little; "
        "cold weights are read from a block of eight times the last-level cache.\n"
    )
    print(
        "Each layer is timed with its best kernel, also where that is not shown to be as fast as "
        "its baseline and is not served. Means are geometric, over the layers of a section. The "
        f"product alone, without the epilogue: {', '.join(sorted(product_only)) or 'none'}.\n"
    )
    machines = {f"{one['cpu']}, {one['cpu_key']}" for one in documents}
    releases = {row["conditions"]["kernel_release"] for row in rows}
    print(f"- CPU: {'; '.join(sorted(machines))}")
    print(f"- Linux {', '.join(sorted(releases))}")
    print(f"- compiler: {', '.join(sorted({row['toolchain'] for row in rows}))}")
    print(f"- date: {', '.join(sorted({one['date'] for one in documents}))}\n")
    print("Reproduce:\n")
    print("```sh")
    print(
        "\n".join(line.strip() for line in (__doc__ or "").splitlines() if line.startswith("    "))
    )
    print("```\n")
    print("![Speed of kernels and baselines over the roofline](performance.svg)\n")


def print_section(
    title: str, layers: Sequence[dict[str, str]], rows: Sequence[Row], notes: dict[str, str]
) -> None:
    """Print the means and a table, the layers first where a baseline is fastest."""
    sizes_of = {layer["name"]: layer for layer in layers}
    baselines = baselines_of(rows)
    print(f"## {title.replace(' ', ', ', 1)}\n")
    for baseline in baselines:
        print_mean(
            baseline, [ratios_of(row)[baseline] for row in rows if baseline in ratios_of(row)]
        )
    best = {row["name"]: min(ratios_of(row).values()) for row in rows}
    print_mean("the best of all", list(best.values()))
    print()
    columns = (*BEFORE, *baselines, *AFTER)
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in sorted(rows, key=lambda row: best[row["name"]]):
        name = row["name"]
        layer = sizes_of[name]
        sizes = f"{layer['m']} x {layer['n']} x {layer['k']}"
        note = notes.get(f"{title} {name}", "") if best[name] < 1 else ""
        line = (name, sizes, layer["epilogue"], *cells(layer, row, baselines), note)
        print(f"| {' | '.join(line)} |")
    print()


def cells(layer: dict[str, str], row: Row, baselines: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a row between its epilogue and the note."""
    flop = 2 * int(layer["m"]) * int(layer["n"]) * int(layer["k"])
    ratios = ratios_of(row)
    return (
        f"`{row['candidate']}`",
        time_text(row["median_ns"]),
        f"{flop / row['median_ns']:.0f}",
        f"{row['share_of_roofline']:.0%}",
        *(f"{ratios[name]:.3f}" if name in ratios else "" for name in baselines),
        f"{ratios[row['best_baseline']]:.3f} ({row['best_baseline'].split()[0]})",
        row["decision"]
        + (", refuted" if row["refuted"] else "")
        + ("" if row["served"] else ", not served"),
    )


def baselines_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of all baselines that were timed, in their order."""
    return list(dict.fromkeys(one["baseline"] for row in rows for one in row["baselines"]))


def ratios_of(row: Row) -> dict[str, float]:
    """Return the speed of the kernel over that of each baseline."""
    return {one["baseline"]: one["ratio"]["median"] for one in row["baselines"]}


def print_mean(baseline: str, ratios: Sequence[float]) -> None:
    """Print the geometric mean beside a baseline over the layers that it was timed for."""
    print(f"- {baseline}: **{geometric_mean(ratios):.3f}** over {len(ratios)} layers")


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
