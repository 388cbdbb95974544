"""Write the front page, docs/performance.md, from the figures of each CPU that was measured."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from bench_rows import HOT, library_of
from markdown_tables import ratio_text, table_head, table_row
from performance_summary import LibraryMean, SectionSummary, Summary, read_summary

from gemm_tuner.domain.dtype import OperandTypes

CPUS = "performance"
FRONT_PAGE = "performance.md"
NOTES_SUFFIX = "-notes"
# The types as the command line has them, which is shorter than the text of a problem.
_SHORT_TYPES = {OperandTypes.parse(name).text: name for name in ("int8", "bf16_s4", "f32_s8")}
_BEHIND_COLUMNS = (
    "Layer",
    "m x n x k",
    "Epilogue",
    "Types",
    "Weights",
    "Threads",
    "Library",
    "Our speed over it",
    "Why",
)
_MEANS_COLUMNS = (
    "Types",
    "Weights",
    "Threads",
    "CPU",
    "Layers",
    "Over each library",
    "Slowest layer",
    "Not served",
    "Left out",
)


def write_front_page(docs: Path) -> None:
    """Write the front page from the figures in the folder of CPUs."""
    (docs / FRONT_PAGE).write_text(front_page_text(docs))


def front_page_text(docs: Path) -> str:
    """Return the front page."""
    summaries = {
        path.stem: read_summary(path)
        for path in sorted((docs / CPUS).glob("*.json"))
        if not path.stem.endswith(NOTES_SUFFIX)
    }
    return "\n".join(_lines(summaries)) + "\n"


def behind_table(summary: Summary) -> Iterator[str]:
    """Yield the layers where a library is faster than our kernel, with the reason."""
    if not summary.behind:
        yield (
            "No library is shown to be faster than our kernel: for no layer does the whole 95 % "
            "interval of the ratio of speeds lie below 1."
        )
        return
    yield (
        f"A library is faster for {len(summary.behind)} of the "
        f"{sum(section.layers for section in summary.sections)} kernels that were timed: the whole "
        "95 % interval of the ratio of speeds lies below 1.\n"
    )
    yield from table_head(_BEHIND_COLUMNS)
    for section, one in summary.behind:
        yield table_row(
            one.layer,
            one.sizes,
            one.epilogue,
            *_context_cells(section),
            one.library,
            ratio_text(one.ratio),
            one.why,
        )


def _lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    yield "# Performance\n"
    yield (
        "The layers of BERT, GPT-2, Llama, ResNet-50, DLRM and ViT, from 16 x 16 x 16 to "
        "2048 x 2048 x 2048, on each CPU that was measured: the best kernel of a sweep, timed "
        "again in a fresh process, in alternation with the libraries that its row of the means "
        "names, each at its best. [measuring.md](measuring.md) says what a number means.\n"
    )
    yield "## What was measured on\n"
    yield from table_head(("CPU", "Key", "Date", "Compiler", "Generator", "All layers"))
    for name, summary in summaries.items():
        yield table_row(
            f"{summary.cpu} ({name})",
            f"`{summary.cpu_key}`",
            *(", ".join(of) for of in (summary.dates, summary.compilers, summary.generators)),
            f"[{name}.md]({CPUS}/{name}.md)",
        )
    yield ""
    for name, summary in summaries.items():
        yield f"![Speed over the roofline on {summary.cpu} ({name})]({CPUS}/{name}.svg)\n"
    yield "## Where a library is faster\n"
    for name, summary in summaries.items():
        yield f"### {summary.cpu} ({name})\n"
        yield from behind_table(summary)
        yield ""
    yield "## Means\n"
    yield (
        "Geometric means of the speed of our kernels over that of each library, over the layers "
        "that were timed beside it; in brackets their number and, where the library is the fastest "
        "of all for some, the mean over these and their number. Every layer counts, also those "
        "that are not served, because their kernels are not shown to be as fast as oneDNN. Left "
        "out are timings that were disturbed or are implausible; older runs did not say which. "
        "Layers with cold weights read them from memory.\n"
    )
    yield from table_head(_MEANS_COLUMNS)
    for name, section in _sections_in_order(summaries):
        yield _means_row(name, section)
    yield ""
    yield (
        "`python benchmarks/publish.py RESULTS` measures all of it on another CPU and adds it "
        "to this page; with `--proofs` it first proves the kernels there."
    )


def _sections_in_order(summaries: Mapping[str, Summary]) -> list[tuple[str, SectionSummary]]:
    """Return the sections of all CPUs, each beside the same of the others."""
    found = [(name, section) for name, of in summaries.items() for section in of.sections]
    types = list(dict.fromkeys(section.types for _name, section in found))
    return sorted(
        found,
        key=lambda one: (
            types.index(one[1].types),
            one[1].threads > 1,
            one[1].regime != HOT,
            one[1].subset,
            one[1].threads,
        ),
    )


def _means_row(name: str, section: SectionSummary) -> str:
    slowest = section.slowest
    return table_row(
        *_context_cells(section),
        name,
        ", ".join(filter(None, (str(section.layers), section.subset))),
        means_text(section),
        f"{ratio_text(slowest.ratio)} ({slowest.layer}, {slowest.library})" if slowest else "",
        str(section.unserved),
        left_out_text(section),
    )


def means_text(section: SectionSummary) -> str:
    """Return the mean over each library: `mkl 1.526 (42; fastest 1.102 of 3)`."""
    return ", ".join(
        f"{library_of(mean.library)} {ratio_text(mean.ratio)} ({mean.layers}{_fastest_text(mean)})"
        for mean in section.means
    )


def _fastest_text(mean: LibraryMean) -> str:
    if mean.fastest == mean.layers:
        return "; always the fastest"
    return f"; fastest {ratio_text(mean.where_fastest)} of {mean.fastest}" if mean.fastest else ""


def left_out_text(section: SectionSummary) -> str:
    """Return how many timings were left out."""
    return "not known" if section.left_out is None else str(section.left_out)


def _context_cells(section: SectionSummary) -> tuple[str, str, str]:
    types = _SHORT_TYPES.get(section.types, section.types)
    return types, section.regime.replace("_weights", ""), str(section.threads)
