"""What `gemm-tuner bench --json` says of a layer, and the sections of a report that rows stand in.

A section is one combination of types, number of threads and regime, such as `f32 hot` or
`f32 hot, 2 threads`. Sections of their own are the few layers that are timed beside Inductor, which
compiles each for tens of seconds, and those that are given for several m.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ONE_THREAD = "one-thread"
INDUCTOR = "torch-inductor"
SEVERAL_M = "several-m"  # in the names of the steps whose layers are given for several m
HOT = "hot"

SHARED = "shared"

Row = dict[str, Any]
SharedLayer = dict[str, Any]


def read_documents(results: Path) -> list[dict[str, Any]]:
    """Return the output of each run of bench in the folder `results`, in the order of the names."""
    documents = []
    for path in sorted(results.glob("*.json")):
        document = json.loads(path.read_text())
        if SHARED not in document:
            documents.append(
                document | {"layers": [row | {"step": path.stem} for row in document["layers"]]}
            )
    return documents


def only_believed(row: Row) -> Row:
    """Return a row without the timings that give reason to doubt; these are its `doubted`."""
    baselines = row["baselines"]
    return row | {
        "baselines": [one for one in baselines if not one.get("doubt")],
        "doubted": [one for one in baselines if one.get("doubt")],
    }


def read_shared(results: Path) -> list[SharedLayer]:
    """Return the output of each sweep for several m of a layer: the layers that share weights."""
    documents = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    return [layer for document in documents for layer in document.get(SHARED, ())]


def sections_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each section: by types, the first measured first, threads and regime."""
    types = list(dict.fromkeys(types_of(row) for row in rows))
    sections: dict[str, list[Row]] = {}
    for row in sorted(
        rows,
        key=lambda row: (
            types.index(types_of(row)),
            row["threads"],
            row["regime"] != HOT,
            subset_of(row),
        ),
    ):
        sections.setdefault(section_of(row), []).append(row)
    return sections


def types_of(row: Row) -> str:
    """Return the types of a row as in the text of its problem: `f32`, `u8_s8_s32_f32`."""
    return str(row["problem"].split()[0])


def sizes_of(row: Row) -> str:
    """Return the sizes as in the text of the problem: `128x768x768`."""
    return str(row["problem"].split()[1])


def epilogue_of(row: Row) -> str:
    """Return the epilogue as in the text of the problem: `bias+relu`."""
    return str(row["problem"].split()[3])


def section_of(row: Row) -> str:
    """Return where a row stands, such as `f32 hot` or `f32 hot, 2 threads`."""
    threads = "" if row["threads"] == 1 else f", {row['threads']} threads"
    return ", ".join(filter(None, (f"{types_of(row)} {row['regime']}{threads}", subset_of(row))))


def subset_of(row: Row) -> str:
    """Return which few layers a row is one of, if not of all: `beside Inductor`, `several m`."""
    timed = [*row["baselines"], *row.get("doubted", ())]
    if any(library_of(one["baseline"]) == INDUCTOR for one in timed):
        return "beside Inductor"
    return SEVERAL_M.replace("-", " ") if SEVERAL_M in row["step"] else ""


def key_of(row: Row) -> str:
    """Return the name of a row among all: its section and its layer."""
    return f"{section_of(row)} {row['name']}"


def baselines_of(rows: Iterable[Row]) -> list[str]:
    """Return all baselines that were timed, in their order, each by name and version."""
    names = (version_of(one["baseline"]) for row in rows for one in row["baselines"])
    return list(dict.fromkeys(names))


def ratios_of(row: Row) -> dict[str, float]:
    """Return the speed of the kernel over that of each baseline, by its name and version."""
    return {version_of(one["baseline"]): one["ratio"]["median"] for one in row["baselines"]}


def best_of(row: Row) -> Row | None:
    """Return the fastest library, if any was timed."""
    libraries = [one for one in row["baselines"] if one["baseline"] != ONE_THREAD]
    return min(libraries, key=lambda one: float(one["ratio"]["median"]), default=None)


def speed_beside_best(row: Row) -> float:
    """Return the speed of the kernel over that of the fastest library; 0 if none was timed."""
    best = best_of(row)
    return float(best["ratio"]["median"]) if best else 0.0


def is_behind(row: Row) -> bool:
    """Return whether a library is faster: the whole interval of the ratio lies below 1."""
    best = best_of(row)
    return best is not None and best["ratio"]["high"] < 1


def library_of(baseline: str) -> str:
    """Return the name of a baseline without its version: `onednn`."""
    return baseline.split(maxsplit=1)[0]


def version_of(baseline: str) -> str:
    """Return the name of a baseline with its version, without what it does besides: `mkl 2026.2`.

    So `mkl 2026.2 + pass`, where one pass computes the epilogue, is the same library.
    """
    return " ".join(baseline.split(maxsplit=2)[:2])
