"""The figures of a CPU's report that the front page of all CPUs is made of, as JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench_rows import (
    ONE_THREAD,
    Row,
    baselines_of,
    best_of,
    epilogue_of,
    is_behind,
    library_of,
    ratios_of,
    sizes_of,
    speed_beside_best,
    subset_of,
    types_of,
    version_of,
)
from performance_notes import Notes


@dataclass(frozen=True, kw_only=True)
class BesideBest:
    """A layer beside the fastest library: `ratio` is the speed of our kernel over the library's.

    `why` says why the library is faster, where it is.
    """

    layer: str
    sizes: str
    epilogue: str
    library: str
    ratio: float
    why: str


@dataclass(frozen=True, kw_only=True)
class LibraryMean:
    """The geometric mean of the speed of our kernels over that of one library.

    It is taken over the `layers` that were timed beside it. The library is the fastest for
    `fastest` of them, and `where_fastest` is the mean over these.
    """

    library: str
    ratio: float
    layers: int
    fastest: int
    where_fastest: float | None


@dataclass(frozen=True, kw_only=True)
class SectionSummary:
    """The means of a section, one for each library, its slowest layer, and where one is faster.

    `subset` is which few layers it has, if not all. `unserved` counts the kernels not shown to be
    as fast as what their verdicts are measured against. `left_out` counts the timings that nothing
    here holds, because they were disturbed or implausible; None where runs did not say so yet.
    """

    types: str
    regime: str
    threads: int
    layers: int
    subset: str = ""
    means: tuple[LibraryMean, ...]
    left_out: int | None
    unserved: int
    slowest: BesideBest | None
    behind: tuple[BesideBest, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was measured on a CPU, on what, when and with what."""

    cpu: str
    cpu_key: str
    linux: tuple[str, ...]
    compilers: tuple[str, ...]
    generators: tuple[str, ...]
    dates: tuple[str, ...]
    sections: tuple[SectionSummary, ...]

    @property
    def behind(self) -> list[tuple[SectionSummary, BesideBest]]:
        """Return where a library is faster, the slowest kernel first."""
        found = [(section, one) for section in self.sections for one in section.behind]
        return sorted(found, key=lambda pair: pair[1].ratio)

    def write(self, path: Path) -> None:
        """Write this to a file that `read_summary` reads."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def summarise(
    documents: Sequence[Mapping[str, Any]], sections: Mapping[str, Sequence[Row]], notes: Notes
) -> Summary:
    """Return the summary of what bench wrote, cut into sections.

    Raises:
        ValueError: the documents are of several CPUs.
    """
    cpus = {(one["cpu"], one["cpu_key"]) for one in documents}
    if len(cpus) != 1:
        keys = ", ".join(sorted(key for _brand, key in cpus))
        raise ValueError(
            f"the results are of several CPUs: {keys}; measure each in a folder of its own."
        )
    (cpu, cpu_key) = cpus.pop()
    rows = [row for of_section in sections.values() for row in of_section]
    return Summary(
        cpu=cpu,
        cpu_key=cpu_key,
        linux=_distinct(row["conditions"]["kernel_release"] for row in rows),
        compilers=_distinct(row["toolchain"] for row in rows),
        generators=_distinct(one["generator"] for one in documents),
        dates=_distinct(one["date"] for one in documents),
        sections=tuple(_summarise_section(of_section, notes) for of_section in sections.values()),
    )


def read_summary(path: Path) -> Summary:
    """Return the summary that `Summary.write` wrote."""
    facts: dict[str, Any] = json.loads(path.read_text())
    facts["sections"] = tuple(_read_section(section) for section in facts["sections"])
    return Summary(**{name: _as_tuple(fact) for name, fact in facts.items()})


def _read_section(facts: dict[str, Any]) -> SectionSummary:
    slowest = facts["slowest"]
    facts["slowest"] = BesideBest(**slowest) if slowest else None
    facts["means"] = tuple(LibraryMean(**one) for one in facts["means"])
    facts["behind"] = tuple(BesideBest(**one) for one in facts["behind"])
    return SectionSummary(**{name: _as_tuple(fact) for name, fact in facts.items()})


def _as_tuple(fact: Any) -> Any:  # noqa: ANN401 - JSON enters here
    return tuple(fact) if isinstance(fact, list) else fact


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _summarise_section(rows: Sequence[Row], notes: Notes) -> SectionSummary:
    compared = [row for row in rows if best_of(row) is not None]
    slowest = min(compared, key=speed_beside_best, default=None)
    return SectionSummary(
        types=types_of(rows[0]),
        regime=rows[0]["regime"],
        threads=rows[0]["threads"],
        layers=len(rows),
        subset=subset_of(rows[0]),
        means=tuple(means_of(rows)),
        left_out=sum(len(row["doubted"]) for row in rows),
        unserved=sum(not row["served"] for row in rows),
        slowest=_beside_best(slowest, notes) if slowest else None,
        behind=tuple(_beside_best(row, notes) for row in compared if is_behind(row)),
    )


def means_of(rows: Sequence[Row]) -> Iterator[LibraryMean]:
    """Yield the mean beside each library, in one version. None is taken over several."""
    for name in baselines_of(rows):
        beside = [ratios_of(row)[name] for row in rows if name in ratios_of(row)]
        bests = [best for row in rows if (best := best_of(row))]
        fastest = [one["ratio"]["median"] for one in bests if version_of(one["baseline"]) == name]
        if name != ONE_THREAD:
            yield LibraryMean(
                library=name,
                ratio=_mean(beside),
                layers=len(beside),
                fastest=len(fastest),
                where_fastest=_mean(fastest) if fastest else None,
            )


def _beside_best(row: Row, notes: Notes) -> BesideBest:
    best = best_of(row)
    return BesideBest(
        layer=row["name"],
        sizes=sizes_of(row),
        epilogue=epilogue_of(row),
        library=library_of(best["baseline"]) if best else "",
        ratio=round(speed_beside_best(row), 3),
        why=notes.why(row),
    )


def _mean(ratios: Sequence[float]) -> float:
    return round(geometric_mean(ratios), 3)
