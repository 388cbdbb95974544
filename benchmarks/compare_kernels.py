"""Time the kernels of two published reports beside each other and oneDNN, layer by layer.

    python benchmarks/compare_kernels.py OLD.md NEW.md OUT.jsonl [SECTION...]

OLD and NEW are reports that performance.py wrote, of this CPU, each with the kernel of every layer;
an old one comes from the history (`git show REVISION:docs/performance/NAME.md`). Both kernels are
built from the templates as they are now, proved, and timed in the same rounds as oneDNN, so that
neither the day nor the library comes between them. SECTION is a heading such as "bf16, hot"; by
default all with oneDNN are compared. Each layer is a line of OUT the moment it is timed; what is
there already is not timed again. Printed are the geometric means of each section.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from markdown_tables import table_head, table_row

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.dtype import OperandTypes
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.units import duration_text
from gemm_tuner.errors import GemmTunerError, TrialFailed
from gemm_tuner.tuning.attempt import build_candidate

GROUPS = ":g128"  # of weights of few bits, in every published section
PAIRS = 30
SAMPLE_NS = 5_000_000
SEED = 3
LEFT_OUT = "beside Inductor"  # the layers and kernels of another section


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of a section, with the text of its kernel in both reports."""

    section: str
    name: str
    problem: str
    old: str
    new: str

    @property
    def context(self) -> ExecutionContext:
        """Return the threads and the regime that the section's heading says."""
        regime = Regime.COLD_WEIGHTS if "cold weights" in self.section else Regime.HOT
        return ExecutionContext(threads=2 if "2 threads" in self.section else 1, regime=regime)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The speeds of a layer's kernels over oneDNN's in the same rounds, whose call takes `ns`."""

    section: str
    name: str
    old: str
    new: str
    old_ratio: float
    new_ratio: float
    onednn_ns: float


def main(old: Path, new: Path, out: Path, sections: Sequence[str]) -> None:
    """Time what is missing in `out`, and print the means of all that is there."""
    layers = [one for one in layers_of(old, new) if not sections or one.section in sections]
    lines = out.read_text().splitlines() if out.exists() else []
    done = [Compared(**json.loads(line)) for line in lines]
    known = {(one.section, one.name) for one in done}
    missing = [one for one in layers if (one.section, one.name) not in known]
    toolchain = find_toolchain(None)
    begin_s = time.monotonic()
    try:
        for count, layer in enumerate(missing):
            left_s = (time.monotonic() - begin_s) / max(count, 1) * (len(missing) - count)
            left = duration_text(left_s) if count else "some time"
            print_message(f"{layer.section}: {layer.name}, {count + 1} of {len(missing)}, {left}")
            try:
                compared = compare(layer, toolchain)
            except GemmTunerError as error:
                print_message(f"{layer.section}: {layer.name} is left out: {error}")
                continue
            done.append(compared)
            with out.open("a") as file:
                print(json.dumps(asdict(compared)), file=file)
    except KeyboardInterrupt:
        print_message("Stopped; the same command goes on from here.")
    for line in means(done):
        print(line)


def layers_of(old: Path, new: Path) -> Iterator[Layer]:
    """Yield the layers that both reports have a kernel for."""
    before = dict(kernels(old))
    for (section, name, problem), candidate in kernels(new):
        if (section, name, problem) in before:
            yield Layer(
                section=section,
                name=name,
                problem=problem,
                old=before[section, name, problem],
                new=candidate,
            )


def kernels(report: Path) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield section, name and problem, and the kernel, of each row that was timed beside oneDNN."""
    section = ""
    columns: list[str] = []
    for line in report.read_text().splitlines():
        if line.startswith("## "):
            section, columns = line.removeprefix("## "), []
        if not line.startswith("| ") or LEFT_OUT in section:
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:4] == ["Layer", "m x n x k", "Epilogue", "Kernel"]:
            columns = cells
        elif columns and any(name.startswith("onednn") for name in columns):
            row = dict(zip(columns, cells, strict=False))
            types = OperandTypes.parse(section.split(",")[0])
            groups = GROUPS if types.is_weight_only else ""
            sizes = row["m x n x k"].replace(" ", "")
            problem = f"{types.text} {sizes} nk{groups} {row['Epilogue']}"
            yield (section, row["Layer"], problem), row["Kernel"].strip("`")


def compare(layer: Layer, toolchain: Toolchain) -> Compared:
    """Return the times of a layer's kernels and of oneDNN in the same rounds.

    Raises:
        GemmTunerError: a kernel is not built or refuted, or oneDNN does not compute the layer.
    """
    problem = Problem.parse(layer.problem)
    texts = list(dict.fromkeys((layer.old, layer.new)))
    builds = [_build(problem, text, toolchain) for text in texts]
    with TrialHost(
        problem,
        threads=layer.context.threads,
        baseline="onednn",
        toolchain=toolchain,
        seed=SEED,
        scalar_build=lambda: builds[0],  # not used: the baseline is named
        races=[Race(regime=layer.context.regime)],
    ) as host:
        for text, one in zip(texts, builds, strict=True):
            finding = host.verify(one)
            if finding.outcome is not Outcome.CORRECT:
                raise TrialFailed(f"{text} is {finding.outcome.value}: {finding.detail}")
        timed = host.time_together(builds, context=layer.context, pairs=PAIRS, sample_ns=SAMPLE_NS)
    besides = dict(zip(texts, map(_beside, timed), strict=True))
    return Compared(
        section=layer.section,
        name=layer.name,
        old=layer.old,
        new=layer.new,
        old_ratio=besides[layer.old].ratio.median,
        new_ratio=besides[layer.new].ratio.median,
        onednn_ns=besides[layer.new].baseline_timing.median_ns,
    )


def _build(problem: Problem, text: str, toolchain: Toolchain) -> Build:
    built = build_candidate(problem, Candidate.parse(text), toolchain=toolchain, render=render)
    if not isinstance(built, Build):
        raise built
    return built


def _beside(timed: TimedFinding) -> Measurement:
    if timed.measurement is None:
        raise TrialFailed(f"{timed.finding.outcome.value}: {timed.finding.detail}")
    return timed.measurement


def means(done: Sequence[Compared]) -> Iterator[str]:
    """Yield a row for each section: both kernels over oneDNN, and the new over the old."""
    yield from table_head(
        ("Section", "Layers", "Same kernel", "Old over oneDNN", "New over oneDNN", "New over old")
    )
    for section in dict.fromkeys(one.section for one in done):
        rows = [one for one in done if one.section == section]
        old = geometric_mean(one.old_ratio for one in rows)
        new = geometric_mean(one.new_ratio for one in rows)
        same = sum(one.old == one.new for one in rows)
        yield table_row(
            section, str(len(rows)), str(same), f"{old:.3f}", f"{new:.3f}", f"{new / old:.3f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
