"""Turn what `gemm-tuner bench --json` printed into a report.

    python tests/bench/performance.py RESULTS > docs/performance.md

RESULTS is the folder that publish.py fills: one JSON document for each run, and the commands that
made them. The report compares each layer with every baseline that was timed in the same rounds.
Why a baseline is faster is for a person to say, in docs/performance-notes.json: by types, regime
and layer, such as "f32 hot cube_2048", which baseline is meant ("beside") and the reason ("why").
A note that no longer fits what was measured is left out and told. The exit code is 1 if a verdict
`tuned` was refuted, or notes do not fit.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[2]
MISFIT = 3  # the exit code where a verdict was refuted or the notes do not fit: not an exception's
NOTES = ROOT / "docs" / "performance-notes.json"
COMMANDS = "commands.txt"
ONE_THREAD = "one-thread"
SLOWER_BELOW = 0.97
HOT = "hot"
BEFORE = ("Layer", "m x n x k", "Epilogue", "Kernel", "Time", "GFLOP/s", "Of roofline")
AFTER = ("Beside the best", "Verdict", "Why a baseline is faster")
HOT_WINNER = "Kernel of hot weights"

Row = dict[str, Any]


@dataclass
class Notes:
    """Why a baseline is faster, by section and layer; `misfits` grows as rows are looked up."""

    texts: Mapping[str, Mapping[str, str]]
    misfits: list[str] = field(default_factory=list)

    def why(self, key: str, row: Row) -> str:
        """Return the reason why a baseline is faster, or nothing where none is or none is known."""
        best = best_of(row)
        note = self.texts.get(key)
        if best is None or best["ratio"]["median"] >= 1:
            if note is not None:
                self.misfits.append(f"{key}: no baseline is faster, remove the note.")
            return ""
        beside = best["baseline"].split()[0]
        if note is not None and note["beside"] == beside:
            return note["why"]
        if note is not None:
            self.misfits.append(f"{key}: written for {note['beside']}, but {beside} is fastest.")
        if best["ratio"]["high"] >= 1:
            return "no difference: the 95 % interval holds 1"
        if note is None:
            self.misfits.append(f"{key}: {beside} is faster, and no note says why.")
        return ""

    def check_keys(self, sections: Mapping[str, Iterable[Row]]) -> None:
        """Find the notes on layers that a section, which was measured, does not have."""
        known = {f"{title} {row['name']}" for title, rows in sections.items() for row in rows}
        self.misfits += [
            f"{key}: this layer was not measured, remove the note."
            for key in self.texts
            if key not in known and key.rsplit(" ", 1)[0] in sections
        ]


def main(results: Path) -> int:
    """Print the report and return the exit code."""
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    rows: list[Row] = [row for document in documents for row in document["layers"]]
    if not rows:
        print(f"{results} holds no result; run publish.py first.", file=sys.stderr)
        return 1
    sections = sections_of(rows)
    notes = Notes(json.loads(NOTES.read_text()) if NOTES.exists() else {})

    print_head(documents, rows, (results / COMMANDS).read_text())
    print_overview(sections)
    for title, of_section in sections.items():
        print_section(title, of_section, sections, notes)
    refuted = [f"{row['problem']} ({row['regime']})" for row in rows if row["refuted"]]
    unchecked = sum(row["refuted"] is None for row in rows)
    print(
        f"Verdicts `tuned` that this separate run refuted: {', '.join(refuted) or 'none'}; "
        f"not checked, because their baseline was not timed: {unchecked}."
    )
    notes.check_keys(sections)
    for misfit in notes.misfits:
        print(f"{NOTES.name}: {misfit}", file=sys.stderr)
    return MISFIT if refuted or notes.misfits else 0


def sections_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each section: by types, the first measured first, threads and regime."""
    types = list(dict.fromkeys(types_of(row) for row in rows))
    sections: dict[str, list[Row]] = {}
    for row in sorted(
        rows, key=lambda row: (types.index(types_of(row)), row["threads"], row["regime"] != HOT)
    ):
        sections.setdefault(section_of(row), []).append(row)
    return sections


def types_of(row: Row) -> str:
    """Return the types of a row as in the text of its problem: `f32`, `u8_s8_s32_f32`."""
    return str(row["problem"].split()[0])


def section_of(row: Row) -> str:
    """Return where a row stands, such as `f32 hot` or `f32 hot, 2 threads`."""
    threads = "" if row["threads"] == 1 else f", {row['threads']} threads"
    return f"{types_of(row)} {row['regime']}{threads}"


def heading(title: str) -> str:
    """Return the heading of a section."""
    return title.replace(" ", ", ", 1).replace("cold_weights", "cold weights")


def print_head(documents: Iterable[dict[str, Any]], rows: Sequence[Row], commands: str) -> None:
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
        "cold weights are read from a block of eight times the last-level cache. "
        "[measuring.md](measuring.md) says more.\n"
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
    print(f"- generator: {', '.join(sorted({one['generator'] for one in documents}))}")
    print(f"- date: {', '.join(sorted({one['date'] for one in documents}))}\n")
    print("Reproduce with `python tests/bench/publish.py RESULTS`, which runs:\n")
    print(f"```sh\n{commands.strip()}\n```\n")
    print("![Speed of kernels and baselines over the roofline](performance.svg)\n")


def print_overview(sections: Mapping[str, Sequence[Row]]) -> None:
    """Print a line for each section: means beside what was timed, and how often it was faster."""
    print("## Overview\n")
    print("| Section | Layers | Beside oneDNN | Beside the best of all | Baseline faster |")
    print("|---|---|---|---|---|")
    for title, rows in sections.items():
        onednn = [ratio for row in rows for name, ratio in ratios_of(row).items() if "dnn" in name]
        best = [one["ratio"] for row in rows if (one := best_of(row)) is not None]
        line = (
            heading(title),
            str(len(rows)),
            f"{geometric_mean(onednn):.3f}" if onednn else "",
            f"{geometric_mean(ratio['median'] for ratio in best):.3f}" if best else "",
            str(sum(ratio["high"] < 1 for ratio in best)),
        )
        print(f"| {' | '.join(line)} |")
    print(
        "\nA baseline counts as faster where the whole 95 % interval of the ratio lies below 1.\n"
    )


def print_section(
    title: str, rows: Sequence[Row], sections: Mapping[str, Sequence[Row]], notes: Notes
) -> None:
    """Print the means and a table, the layers first where a baseline is fastest."""
    baselines = baselines_of(rows)
    print(f"## {heading(title)}\n")
    for baseline in baselines:
        print_mean(
            baseline, [ratios_of(row)[baseline] for row in rows if baseline in ratios_of(row)]
        )
    print_mean("the best of all", [one["ratio"]["median"] for row in rows if (one := best_of(row))])
    print_beside_one_thread(rows)
    hot_kernels = kernels_of_hot_weights(title, sections)
    if hot_kernels:
        differing = sum(row["candidate"] != hot_kernels.get(row["name"]) for row in rows)
        print(
            f"- another kernel than with hot weights: {differing} of {len(rows)} layers; "
            "both are kept, and served by regime"
        )
    print()
    columns = (*BEFORE, *baselines, *AFTER[:-1], *([HOT_WINNER] if hot_kernels else []), AFTER[-1])
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for row in sorted(rows, key=speed_beside_best):
        name = row["name"]
        hot = [hot_cell(row, hot_kernels)] if hot_kernels else []
        line = (
            name,
            sizes_of(row).replace("x", " x "),
            row["problem"].split()[3],
            *cells(row, baselines),
            *hot,
            notes.why(f"{title} {name}", row),
        )
        print(f"| {' | '.join(line)} |")
    print()


def print_beside_one_thread(rows: Iterable[Row]) -> None:
    """Say for how many layers several threads are slower than one, if that was timed."""
    beside = {
        row["name"]: one["ratio"]
        for row in rows
        for one in row["baselines"]
        if one["baseline"] == ONE_THREAD
    }
    if beside:
        slower = [name for name, ratio in beside.items() if ratio["high"] < SLOWER_BELOW]
        print(
            f"- more than 3 % slower than one thread: {', '.join(slower) or 'none'} of "
            f"{len(beside)} layers"
        )


def kernels_of_hot_weights(title: str, sections: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Return the kernels of the same layers with hot weights, if `title` is of cold ones."""
    hot_title = title.replace("cold_weights", HOT)
    if hot_title == title:
        return {}
    return {row["name"]: row["candidate"] for row in sections.get(hot_title, ())}


def hot_cell(row: Row, hot_kernels: Mapping[str, str]) -> str:
    """Return the kernel of hot weights, where it is known and another one."""
    kernel = hot_kernels.get(row["name"])
    if kernel is None:
        return ""
    return "the same" if kernel == row["candidate"] else f"`{kernel}`"


def sizes_of(row: Row) -> str:
    """Return the sizes as in the text of the problem: `128x768x768`."""
    return str(row["problem"].split()[1])


def cells(row: Row, baselines: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a row between its epilogue and the note."""
    m, n, k = (int(size) for size in sizes_of(row).split("x"))
    ratios = ratios_of(row)
    best = best_of(row)
    return (
        f"`{row['candidate']}`",
        time_text(row["median_ns"]),
        f"{2 * m * n * k / row['median_ns']:.0f}",
        f"{row['share_of_roofline']:.0%}",
        *(f"{ratios[name]:.3f}" if name in ratios else "" for name in baselines),
        f"{best['ratio']['median']:.3f} ({best['baseline'].split()[0]})" if best else "",
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


def best_of(row: Row) -> dict[str, Any] | None:
    """Return the fastest library, if any was timed."""
    libraries = [one for one in row["baselines"] if one["baseline"] != ONE_THREAD]
    return min(libraries, key=lambda one: float(one["ratio"]["median"]), default=None)


def speed_beside_best(row: Row) -> float:
    """Return the speed of the kernel over that of the fastest library."""
    best = best_of(row)
    return float(best["ratio"]["median"]) if best else 0.0


def print_mean(baseline: str, ratios: Sequence[float]) -> None:
    """Print the geometric mean beside a baseline over the layers that it was timed for."""
    if ratios:
        print(f"- {baseline}: **{geometric_mean(ratios):.3f}** over {len(ratios)} layers")


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
