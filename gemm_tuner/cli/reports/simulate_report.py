"""What `gemm-tuner simulate` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import bytes_text, counted, time_text
from gemm_tuner.scaling.server import Server
from gemm_tuner.scaling.simulate import Simulated

_COLUMNS = (
    *(">threads", "cut", ">time", ">speed-up", ">efficiency", ">uneven", ">waiting", ">barrier"),
    *(">from L3", ">memory", ">link", "bound by"),
)

Ranking = Sequence[tuple[Candidate, Simulated]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A kernel whose calls of so many rows are simulated; `reason` says why this kernel."""

    problem: Problem
    rows: int
    candidate: Candidate
    reason: str
    server: Server
    is_timed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The simulated calls of a kernel in one regime, and the time of one thread."""

    regime: Regime
    one_thread_ns: float
    calls: tuple[Simulated, ...]

    @property
    def points(self) -> list[tuple[Simulated, float]]:
        """Return each call and its speed over one thread."""
        return [(one, self.one_thread_ns / one.time_ns) for one in self.calls]


def print_curves(asked: Simulation, curves: Sequence[Curve]) -> None:
    """Print a table for each regime."""
    how = "timed alone here" if asked.is_timed else "predicted by the model"
    print_line(
        f"{_call_text(asked.problem, asked.rows)}: {asked.candidate.text}, {asked.reason}; its "
        f"parts are {how}."
    )
    print_line(f"{asked.server.text}\n")
    for curve in curves:
        print_table(
            f"Weights {_where(curve.regime)}",
            _COLUMNS,
            [_row(one, speed_up) for one, speed_up in curve.points],
        )
        print_line("")
    print_line(
        "Uneven parts, waiting for what cores share, and barriers are shares of the time; bytes "
        "are those of all parts. Waiting, barriers and bytes are predicted, by the table of cores."
    )


def simulation_facts(asked: Simulation, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the same as JSON facts."""
    return {
        "problem": asked.problem.text,
        "m": asked.rows,
        "candidate": asked.candidate.text,
        "candidate_is": asked.reason,
        "server": asked.server.text,
        "basis": "timed" if asked.is_timed else "predicted",
        "regimes": [_curve_facts(one) for one in curves],
    }


def _curve_facts(curve: Curve) -> dict[str, Any]:
    return {
        "regime": curve.regime.value,
        "calls": [
            _facts(one) | {"speed_up": speed_up, "efficiency": speed_up / one.threads}
            for one, speed_up in curve.points
        ],
    }


def print_ranking(
    problem: Problem, rows: int, server: Server, rankings: Mapping[Regime, Ranking], count: int
) -> None:
    """Print the kernels whose calls of so many rows are the fastest, for each regime."""
    print_line(f"{_call_text(problem, rows)}: kernels predicted, none is timed.")
    print_line(server.text)
    for regime, ranking in rankings.items():
        best_ns = ranking[0][1].time_ns
        print_line("")
        print_table(
            f"{counted(ranking[0][1].threads, 'thread')}, weights {_where(regime)}",
            (">rank", "candidate", "cut", ">time", ">of the best", "bound by"),
            [
                (
                    str(place),
                    candidate.text,
                    one.cut,
                    time_text(one.time_ns),
                    f"{best_ns / one.time_ns:.2f}",
                    one.bound.value,
                )
                for place, (candidate, one) in enumerate(ranking[:count], start=1)
            ],
        )


def ranking_facts(
    problem: Problem, rows: int, server: Server, rankings: Mapping[Regime, Ranking], count: int
) -> dict[str, Any]:
    """Return rankings as JSON facts."""
    return {
        "problem": problem.text,
        "m": rows,
        "server": server.text,
        "regimes": [
            {
                "regime": regime.value,
                "ranking": [
                    {"candidate": candidate.text, **_facts(one)}
                    for candidate, one in ranking[:count]
                ],
            }
            for regime, ranking in rankings.items()
        ],
    }


def _call_text(problem: Problem, rows: int) -> str:
    return problem.text if problem.m.high == rows else f"{problem.text} with m = {rows}"


def _where(regime: Regime) -> str:
    return "in the caches (hot)" if regime is Regime.HOT else "in memory (cold)"


def _row(one: Simulated, speed_up: float) -> tuple[str, ...]:
    losses = (one.uneven_ns, one.waiting_ns, one.barrier_ns)
    read = (one.l3_bytes, one.memory_bytes, one.link_bytes)
    return (
        str(one.threads),
        one.cut,
        time_text(one.time_ns),
        f"{speed_up:.1f}",
        f"{speed_up / one.threads:.0%}",
        *(f"{loss_ns / one.time_ns:.0%}" for loss_ns in losses),
        *(bytes_text(round(size)) if size else "" for size in read),
        one.bound.value,
    )


def _facts(one: Simulated) -> dict[str, Any]:
    return {
        "threads": one.threads,
        "cut": one.cut,
        "time_ns": one.time_ns,
        "work_ns": one.work_ns,
        "uneven_ns": one.uneven_ns,
        "waiting_ns": one.waiting_ns,
        "barrier_ns": one.barrier_ns,
        "l3_bytes": one.l3_bytes,
        "memory_bytes": one.memory_bytes,
        "link_bytes": one.link_bytes,
        "bound": one.bound.value,
    }
