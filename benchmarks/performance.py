"""Turn what `gemm-tuner bench --json` printed into the report of a CPU, and the front page of all.

    python benchmarks/performance.py RESULTS NAME [DOCS]

RESULTS is the folder that publish.py fills: one JSON document for each run, and the commands that
made them. Written are DOCS/performance/NAME.md, its picture NAME.svg and its figures NAME.json, and
DOCS/performance.md, the front page, from the figures of all CPUs. The report compares each layer
with every baseline that was timed in the same rounds. Why a library is faster is for a person to
say, in DOCS/performance/NAME-notes.json (performance_notes.py has its form); a note that no longer
fits what was measured is left out and told. The exit code is 3 if a verdict `tuned` was refuted, or
notes do not fit.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench_rows import (
    HOT,
    ONE_THREAD,
    Row,
    SharedLayer,
    baselines_of,
    best_of,
    epilogue_of,
    library_of,
    only_believed,
    ratios_of,
    read_documents,
    read_shared,
    sections_of,
    sizes_of,
    speed_beside_best,
    types_of,
)
from front_page import CPUS, behind_table, left_out_text, means_text, write_front_page
from markdown_tables import table_head, table_row
from performance_notes import Notes, read_notes
from performance_sharing import sharing_lines
from performance_summary import (
    LibraryMean,
    SectionSummary,
    Summary,
    means_of,
    read_summary,
    summarise,
)

from gemm_tuner.cli.reports.roofline_plot import KERNEL, PlotLine, draw

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS = "commands.txt"
MISFIT = 3  # the exit code where a verdict was refuted or the notes do not fit: not an exception's
SLOWER_BELOW = 0.97
BEFORE = ("Layer", "m x n x k", "Epilogue", "Kernel", "Time", "GFLOP/s", "Of roofline")
AFTER = ("Beside the best", "Verdict", "Why a library is faster")
OVERVIEW = ("Section", "Layers", "Over each library", "Left out", "Library faster")
HOT_WINNER = "Kernel of hot weights"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is said of a CPU: its rows by section, and what was found out about them."""

    name: str
    rows: Sequence[Row]
    sections: Mapping[str, Sequence[Row]]
    notes: Notes
    summary: Summary
    shared: Sequence[SharedLayer]
    commands: str

    @property
    def refuted(self) -> list[str]:
        """Return the verdicts `tuned` that these runs contradict."""
        return [f"{row['problem']} ({row['regime']})" for row in self.rows if row["refuted"]]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report, the layers first where a library is faster."""
        yield f"# Performance of {self.summary.cpu} ({self.name})\n"
        yield from head_lines(self.rows)
        yield from behind_table(self.summary)
        yield ""
        yield from condition_lines(self.summary, self.commands)
        yield f"![Speed of kernels and baselines over the roofline]({self.name}.svg)\n"
        yield from overview_lines(dict(zip(self.sections, self.summary.sections, strict=True)))
        for title, rows in self.sections.items():
            yield from section_lines(title, rows, self.sections, self.notes)
        yield from sharing_lines(self.shared)
        unchecked = sum(row["refuted"] is None for row in self.rows)
        yield (
            f"Verdicts `tuned` that this separate run refuted: {', '.join(self.refuted) or 'none'};"
            f" not checked, because their baseline was not timed: {unchecked}."
        )


def write_reports(results: Path, name: str, docs: Path) -> int:
    """Write the report of a CPU and the front page; return the exit code.

    Raises:
        ValueError: the results are of several CPUs, or another one has a report of this name.
    """
    documents = read_documents(results)
    if not any(document["layers"] for document in documents):
        print(f"{results} holds no result; run publish.py first.", file=sys.stderr)
        return 1
    folder = docs / CPUS
    folder.mkdir(parents=True, exist_ok=True)
    report = report_of(name, results, documents, folder / f"{name}-notes.json")
    check_name(name, report.summary.cpu_key, docs)
    report.summary.write(folder / f"{name}.json")
    (folder / f"{name}.md").write_text("\n".join(report.lines()) + "\n")
    (folder / f"{name}.svg").write_text(picture_of(next(iter(report.sections.values()))))
    write_front_page(docs)
    for misfit in report.notes.misfits:
        print(f"{name}-notes.json: {misfit}", file=sys.stderr)
    return MISFIT if report.refuted or report.notes.misfits else 0


def check_name(name: str, cpu_key: str, docs: Path) -> None:
    """Check that no other CPU has a report of this name.

    Raises:
        ValueError: one has.
    """
    figures = docs / CPUS / f"{name}.json"
    if figures.exists() and (known := read_summary(figures).cpu_key) != cpu_key:
        raise ValueError(f"{figures} is of {known}, not of {cpu_key}; give this CPU another name.")


def report_of(
    name: str, results: Path, documents: Sequence[Mapping[str, Any]], notes: Path
) -> Report:
    """Return the report of what bench wrote, and what each sweep for several m."""
    rows = [only_believed(row) for document in documents for row in document["layers"]]
    sections = sections_of(rows)
    found = read_notes(notes, rows)
    return Report(
        name=name,
        rows=rows,
        sections=sections,
        notes=found,
        summary=summarise(documents, sections, found),
        shared=read_shared(results),
        commands=(results / COMMANDS).read_text(),
    )


def picture_of(rows: Sequence[Row]) -> str:
    """Return the picture of a section."""
    return draw(
        [
            PlotLine(
                name=row["name"],
                sizes=sizes_of(row),
                context=context_of(row),
                shares={KERNEL: row["share_of_roofline"]}
                | {one["baseline"]: one["share_of_roofline"] for one in row["baselines"]},
            )
            for row in rows
        ]
    )


def context_of(row: Row) -> str:
    """Return how a row was timed: `f32, hot, 1 thread`."""
    plural = "" if row["threads"] == 1 else "s"
    return f"{types_of(row)}, {row['regime']}, {row['threads']} thread{plural}"


def heading(title: str) -> str:
    """Return the heading of a section."""
    return title.replace(" ", ", ", 1).replace("cold_weights", "cold weights")


def head_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the meaning of the numbers."""
    product_only = {
        one["baseline"] for row in rows for one in row["baselines"] if one["computes"] == "product"
    }
    yield (
        "Best kernels of `gemm-tuner sweep`, timed again by `gemm-tuner bench` in fresh processes: "
        "interleaved rounds with the baselines that a section names, each at its best, "
        "weights packed and epilogue fused where the library can. Times are medians; a ratio is "
        "the median of the paired ratios of speed, above 1 where the kernel is faster. Roofline: "
        "the larger of flop over the peak of a multiply-add loop timed in alternation, and bytes "
        "over the rate of a plain read loop at that footprint, which a kernel may exceed a little; "
        "cold weights are read from a block of eight times the last-level cache. "
        "[measuring.md](../measuring.md) says more.\n"
    )
    yield (
        "Each layer is timed with its best kernel, also where that is not shown to be as fast as "
        "its baseline and is not served. Means are geometric, one for each library over the layers "
        "that were timed beside it. Timings that were disturbed or are implausible are left out. "
        f"The product alone, without the epilogue: {', '.join(sorted(product_only)) or 'none'}.\n"
    )


def condition_lines(summary: Summary, commands: str) -> Iterator[str]:
    """Yield the machine, the software and the commands of a measurement."""
    yield "## Conditions\n"
    yield f"- CPU: {summary.cpu}, {summary.cpu_key}"
    yield f"- Linux {', '.join(summary.linux)}"
    yield f"- compiler: {', '.join(summary.compilers)}"
    yield f"- generator: {', '.join(summary.generators)}"
    yield f"- date: {', '.join(summary.dates)}\n"
    yield "`python benchmarks/publish.py RESULTS` measures it again. These figures are of:\n"
    yield f"```sh\n{commands.strip()}\n```\n"


def overview_lines(sections: Mapping[str, SectionSummary]) -> Iterator[str]:
    """Yield a line for each section: its means, and how often a library was faster."""
    yield "## Overview\n"
    yield from table_head(OVERVIEW)
    for title, section in sections.items():
        yield table_row(
            heading(title),
            str(section.layers),
            means_text(section),
            left_out_text(section),
            str(len(section.behind)),
        )
    yield "\nA library counts as faster where the whole 95 % interval of the ratio lies below 1.\n"


def section_lines(
    title: str, rows: Sequence[Row], sections: Mapping[str, Sequence[Row]], notes: Notes
) -> Iterator[str]:
    """Yield the means and a table, the layers first where a library is fastest."""
    baselines = baselines_of(rows)
    yield f"## {heading(title)}\n"
    for mean in means_of(rows):
        yield f"- {mean_text(mean)}"
    yield from beside_one_thread_lines(rows)
    hot_kernels = kernels_of_hot_weights(title, sections)
    if hot_kernels:
        differing = sum(row["candidate"] != hot_kernels.get(row["name"]) for row in rows)
        yield (
            f"- another kernel than with hot weights: {differing} of {len(rows)} layers; "
            "both are kept, and served by regime"
        )
    yield ""
    columns = (*BEFORE, *baselines, *AFTER[:-1], *([HOT_WINNER] if hot_kernels else []), AFTER[-1])
    yield from table_head(columns)
    for row in sorted(rows, key=speed_beside_best):
        hot = [hot_cell(row, hot_kernels)] if hot_kernels else []
        yield table_row(
            row["name"],
            sizes_of(row).replace("x", " x "),
            epilogue_of(row),
            *cells(row, baselines),
            *hot,
            notes.why(row),
        )
    yield ""


def mean_text(mean: LibraryMean) -> str:
    """Return the mean over one library, and that over the layers where it is the fastest."""
    over_all = f"{mean.library}: **{mean.ratio:.3f}** over {mean.layers} layers"
    if mean.where_fastest is None:
        return f"{over_all}, nowhere the fastest"
    if mean.fastest == mean.layers:
        return f"{over_all}, always the fastest"
    return f"{over_all}, {mean.where_fastest:.3f} over the {mean.fastest} where it is the fastest"


def beside_one_thread_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Say for how many layers several threads are slower than one, if that was timed."""
    beside = {
        row["name"]: one["ratio"]
        for row in rows
        for one in row["baselines"]
        if one["baseline"] == ONE_THREAD
    }
    if beside:
        mean = geometric_mean(ratio["median"] for ratio in beside.values())
        yield f"- {ONE_THREAD}: **{mean:.3f}** over {len(beside)} layers"
        slower = [name for name, ratio in beside.items() if ratio["high"] < SLOWER_BELOW]
        yield (
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


def cells(row: Row, baselines: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a row between its epilogue and the note."""
    # A range of m is timed at its end.
    m, n, k = (int(size.rpartition("..")[2]) for size in sizes_of(row).split("x"))
    ratios = ratios_of(row)
    best = best_of(row)
    return (
        f"`{row['candidate']}`",
        time_text(row["median_ns"]),
        f"{2 * m * n * k / row['median_ns']:.0f}",
        f"{row['share_of_roofline']:.0%}",
        *(f"{ratios[name]:.3f}" if name in ratios else "" for name in baselines),
        f"{best['ratio']['median']:.3f} ({library_of(best['baseline'])})" if best else "",
        row["decision"]
        + (", refuted" if row["refuted"] else "")
        + ("" if row["served"] else ", not served"),
    )


def time_text(nanoseconds: float) -> str:
    """Return a time with its unit."""
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


if __name__ == "__main__":
    results, name, *docs = sys.argv[1:]
    sys.exit(write_reports(Path(results), name, Path(docs[0]) if docs else DOCS))
