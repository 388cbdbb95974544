"""The layers whose scaling is measured, their kernels, and the sections of docs/scaling.md."""

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path

from gemm_tuner.bench.parts import PartsTimer, build_parts_timer
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.topology import detect_topology
from gemm_tuner.select.recorded import recorded_winners, records_at_hand
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
LAYERS = Path(__file__).with_name("layers.csv")
_LEAST_FLOP = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A problem, its name and the kernel that computes it."""

    name: str
    problem: Problem
    candidate: Candidate

    def timer(self) -> PartsTimer:
        """Return a timer of the kernel's parts and calls."""
        return build_parts_timer(
            self.problem, self.candidate, cpu=detect_cpu(), toolchain=find_toolchain()
        )


def parse_options(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a script that makes a section, described by its first line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--layers", type=Path, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=540.0, help="of all layers together")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scaling.md")
    return parser.parse_args(arguments)


def problems_of(path: Path, dtype: str) -> Iterator[tuple[str, Problem]]:
    """Yield the layers of a file that are large enough to be shared, each with its name."""
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            sizes = f"{row['m']}x{row['n']}x{row['k']}"
            problem = Problem.parse(f"{dtype} {sizes} nk {row['epilogue']}")
            if problem.flop(problem.m.high) >= _LEAST_FLOP:
                yield row["name"], problem


def layers_of(path: Path, dtype: str) -> Iterator[Layer]:
    """Yield the same with the kernels that `best` names."""
    for name, problem in problems_of(path, dtype):
        yield Layer(name=name, problem=problem, candidate=best(problem))


def best(problem: Problem) -> Candidate:
    """Return what won on one thread, by the database or the package, or what is tried first."""
    cpu = detect_cpu()
    space = Space(problem=problem, cpu=cpu)
    records = records_at_hand(_repository(), problem, cpu)
    winners = recorded_winners(records, space, ExecutionContext()).candidates
    return winners[0] if winners else min(space.defaults(), key=partial(_cycles, problem))


@cache
def _repository() -> Repository:
    return Repository(open_database())


def _cycles(problem: Problem, candidate: Candidate) -> float:
    family = family_named(candidate.micro_kernel.family)
    return predict_cycles(problem, candidate, family, detect_cpu())


def machine_text() -> str:
    """Return where and when something was measured."""
    cpu, topology = detect_cpu(), detect_topology()
    today = datetime.now(UTC).date().isoformat()
    return f"{cpu.brand}, family {cpu.family}, model {cpu.model}, {topology.text}, {today}"


def write_section(name: str, text: str) -> None:
    """Put text between the marks of a section of the page.

    Raises:
        ValueError: the page has no such section.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = PAGE.read_text().partition(begin)
    _old, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{PAGE} has no section {name!r}; add its two marks.")
    PAGE.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
