"""Tune the public layers twice, and adopt them once, and time the three answers side by side.

    python benchmarks/agreement.py RESULTS [--layers benchmarks/layers.csv] [--dtype f32]
                                   [--budget 10s] [--max-layers N]

Two sweeps begin with empty databases. A third database gets the records of the first sweep, as if
another machine of this CPU model had made them, and `gemm-tuner adopt` takes what they say. Then
the kernels that were found are built anew and timed in the same rounds, beside the libraries that
the sweeps named. Printed are, of the layers, how many have a second kernel within 2 % of the first,
how fast the adopted ones are, how long adopting one took, and whether a verdict `tuned` is refuted.
Everything lies in the folder RESULTS; what is there already is not done again. The exit code is 1
if a verdict is refuted, or fewer than 95 % of the layers agree. Be alone on the machine.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from markdown_tables import table_head, table_row

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.units import duration_text
from gemm_tuner.errors import GemmTunerError, TrialFailed
from gemm_tuner.tuning.attempt import build_candidate

NAMES = ("first", "second", "adopted")
WITHIN = 0.02
AGREE = 0.95  # of the layers
REFUTED = 0.98  # of the speed of the library that a verdict says is slower
PROCESSES = 5
PAIRS = 11  # in each process
SAMPLE_NS = 5_000_000
SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a sweep, or an adoption, said of a layer."""

    problem: str
    candidate: str
    library: str
    is_tuned: bool

    @property
    def baseline(self) -> str:
        """Return the name of the library in the table of baselines."""
        return self.library.split()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The times of a call of a layer's kernels, in the order of `NAMES`, in the same rounds.

    `over` are their speeds over the library that each was compared with.
    """

    name: str
    candidates: tuple[str, ...]
    is_tuned: tuple[bool, ...]
    times_ns: tuple[float, ...]
    over: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is missing in RESULTS, print the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--layers", type=Path, default=Path(__file__).parent / "layers.csv")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--budget", default="10s")
    parser.add_argument("--max-layers", type=int, help="only so many, evenly spread")
    asked = parser.parse_args(arguments)
    asked.results.mkdir(parents=True, exist_ok=True)
    layers = asked.results / "layers.csv"
    write_layers(asked.layers, layers, asked.max_layers)
    common = ("--shapes", str(layers), "--dtype", asked.dtype)
    try:
        for name in NAMES[:2]:
            run(asked.results, name, ("sweep", *common, "--budget", asked.budget))
        adoptions_s = adopt(asked.results, common)
        compared = compare_all(asked.results)
    except KeyboardInterrupt:
        print_message("Stopped; the same command goes on from here.")
        return 130
    for line in report(compared, adoptions_s):
        print(line)
    return int(agreeing(compared) < AGREE or bool(refuted(compared)))


def write_layers(source: Path, target: Path, most: int | None) -> None:
    """Write the layers to compare: all, or `most`, evenly spread."""
    with source.open(newline="") as file:
        head, *rows = csv.reader(file)
    if most is not None and most < len(rows):
        rows = [rows[place * len(rows) // most] for place in range(most)]
    with target.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def run(results: Path, name: str, command: Sequence[str]) -> None:
    """Run a command of gemm-tuner on the database of that name, and keep what it says as JSON."""
    out = results / f"{name}.json"
    if out.exists():
        return
    print_message(f"{name}: gemm-tuner {' '.join(command)}")
    database = f"sqlite:///{(results / f'{name}.sqlite3').resolve()}"
    done = subprocess.run(
        [sys.executable, "-m", "gemm_tuner", *command, "--db", database, "--json"],
        stdout=subprocess.PIPE,
        check=False,
    )
    document = json.loads(done.stdout or "{}")
    if done.returncode not in (0, 1) or document.get("not_begun", True):  # 1: a layer has no kernel
        raise SystemExit(f"{name} ended with {done.returncode}; the same command goes on.")
    out.write_text(json.dumps(document, indent=1))


def adopt(results: Path, common: Sequence[str]) -> list[float]:
    """Adopt what the first sweep recorded, and return the seconds that each layer took."""
    if not (results / "adopted.json").exists():
        database = f"sqlite:///{(results / 'first.sqlite3').resolve()}"
        exported = subprocess.run(
            [sys.executable, "-m", "gemm_tuner", "records", "export", "--db", database],
            stdout=subprocess.PIPE,
            check=True,
        )
        (results / "first.jsonl").write_bytes(exported.stdout)
        database = f"sqlite:///{(results / 'adopted.sqlite3').resolve()}"
        records = ("records", "import", str(results / "first.jsonl"), "--db", database)
        subprocess.run([sys.executable, "-m", "gemm_tuner", *records], check=True)
        run(results, "adopted", ("adopt", *common))
    layers = json.loads((results / "adopted.json").read_text())["layers"]
    return [layer["took_s"] for layer in layers if layer.get("took_s")]


def found_in(results: Path, name: str) -> dict[str, Found]:
    """Return what was found of each layer, by its name."""
    document = json.loads((results / f"{name}.json").read_text())
    return {
        layer["name"]: Found(
            problem=layer["problem"],
            candidate=layer["candidate"],
            library=layer["instead"]["library"],
            is_tuned=layer["decision"] == "tuned",
        )
        for layer in document["layers"]
        if layer["candidate"] and layer["instead"]
    }


def compare_all(results: Path) -> list[Compared]:
    """Time what is not yet compared, one layer after the other, and return all."""
    found = [found_in(results, name) for name in NAMES]
    out = results / "compared.jsonl"
    lines = out.read_text().splitlines() if out.exists() else []
    compared = [_compared(json.loads(line)) for line in lines]
    missing = [
        name
        for name in found[0]
        if all(name in one for one in found) and name not in {one.name for one in compared}
    ]
    toolchain, begin_s = find_toolchain(None), time.monotonic()
    for count, name in enumerate(missing):
        left_s = (time.monotonic() - begin_s) / max(count, 1) * (len(missing) - count)
        left = duration_text(left_s) if count else "some time"
        print_message(f"{name}, {count + 1} of {len(missing)}, {left} left")
        try:
            compared.append(compare(name, [one[name] for one in found], toolchain))
        except GemmTunerError as error:
            print_message(f"{name} is left out: {error}")
            continue
        with out.open("a") as file:
            print(json.dumps(asdict(compared[-1])), file=file)
    return compared


def _compared(document: dict[str, Any]) -> Compared:
    lists = {key: value for key, value in document.items() if key != "name"}
    return Compared(name=document["name"], **{key: tuple(each) for key, each in lists.items()})


def compare(name: str, found: Sequence[Found], toolchain: Toolchain) -> Compared:
    """Return the times of a layer's kernels in the same rounds, the median of several processes.

    Raises:
        GemmTunerError: a kernel is not built or refuted, or a library does not compute the layer.
    """
    problem = Problem.parse(found[0].problem)
    texts = list(dict.fromkeys(one.candidate for one in found))
    libraries = list(dict.fromkeys(one.baseline for one in found))
    builds = [_build(problem, text, toolchain) for text in texts]
    with TrialHost(
        problem,
        threads=1,
        baseline=libraries,
        toolchain=toolchain,
        seed=SEED,
        scalar_build=lambda: builds[0],
    ) as host:
        for text, one in zip(texts, builds, strict=True):
            finding = host.verify(one)
            if finding.outcome is not Outcome.CORRECT:
                raise TrialFailed(f"{text} is {finding.outcome.value}: {finding.detail}")
        timed = [
            host.time_together(
                builds,
                context=ExecutionContext(),
                pairs=PAIRS,
                sample_ns=SAMPLE_NS,
                process=process,
                keeps_all=True,
            )
            for process in range(PROCESSES)
        ]
    measured: dict[tuple[str, str], list[Measurement]] = {}
    for text, one in zip(texts * PROCESSES, chain.from_iterable(timed), strict=True):
        for measurement in one.measurements:
            library = measurement.baseline.split()[0]
            measured.setdefault((text, library), []).append(measurement)
    if len(measured) < len(texts) * len(libraries):
        details = [one.finding.detail for of_all in timed for one in of_all]
        raise TrialFailed("; ".join(detail for detail in details if detail))
    own = [measured[one.candidate, one.baseline] for one in found]
    return Compared(
        name=name,
        candidates=tuple(one.candidate for one in found),
        is_tuned=tuple(one.is_tuned for one in found),
        times_ns=tuple(median(one.candidate.median_ns for one in of_one) for of_one in own),
        over=tuple(median(one.ratio.median for one in of_one) for of_one in own),
    )


def _build(problem: Problem, text: str, toolchain: Toolchain) -> Build:
    built = build_candidate(problem, Candidate.parse(text), toolchain=toolchain, render=render)
    if not isinstance(built, Build):
        raise built
    return built


def agreeing(compared: Sequence[Compared]) -> float:
    """Return the share of the layers whose second kernel takes at most 2 % more than the first."""
    near = [one for one in compared if one.times_ns[1] <= (1 + WITHIN) * one.times_ns[0]]
    return len(near) / len(compared) if compared else 0.0


def refuted(compared: Sequence[Compared]) -> list[str]:
    """Return what was called tuned and is slower than its library."""
    return [
        f"{one.name}, {name}: {over:.3f}"
        for one in compared
        for name, is_tuned, over in zip(NAMES, one.is_tuned, one.over, strict=True)
        if is_tuned and over <= REFUTED
    ]


def report(compared: Sequence[Compared], adoptions_s: Sequence[float]) -> Iterator[str]:
    """Yield a row for each layer, and what all say."""
    yield from table_head(
        (
            *("Layer", "First", "Second over first", "Adopted over first"),
            *(f"{name.capitalize()} over its library" for name in NAMES),
        )
    )
    for one in compared:
        first, second, adopted = one.times_ns
        said = [
            f"{over:.3f}, tuned" if is_tuned else f"{over:.3f}"
            for is_tuned, over in zip(one.is_tuned, one.over, strict=True)
        ]
        yield table_row(
            one.name,
            f"{first / 1e3:.1f} µs",
            f"{first / second:.3f}",
            f"{first / adopted:.3f}",
            *said,
        )
    if not compared:
        return
    ratios = [[one.times_ns[0] / one.times_ns[place] for one in compared] for place in (1, 2)]
    same = sum(one.candidates[0] == one.candidates[1] for one in compared)
    yield ""
    yield (
        f"{100 * agreeing(compared):.0f} % of {len(compared)} layers have a second kernel within "
        f"{100 * WITHIN:.0f} % of the first ({same} have the same); its speed over the first is "
        f"{geometric_mean(ratios[0]):.3f} in the geometric mean, {min(ratios[0]):.3f} at least."
    )
    yield (
        f"Adopted kernels have {geometric_mean(ratios[1]):.3f} times the speed of the first, "
        f"{min(ratios[1]):.3f} at least, {median(ratios[1]):.3f} in the median."
    )
    if adoptions_s:
        yield (
            f"Adopting a layer took {median(adoptions_s):.1f} s in the median, "
            f"{max(adoptions_s):.1f} s at most."
        )
    claims = sum(sum(one.is_tuned) for one in compared)
    yield f"Of {claims} verdicts tuned, refuted: {', '.join(refuted(compared)) or 'none'}."


if __name__ == "__main__":
    sys.exit(main())
