"""Compare simulated calls with timed ones, on as many threads as there are cores here.

    python benchmarks/simulation_error.py [--dtype f32] [--layers benchmarks/layers.csv]
                                          [--seconds 540] [--write]

For each layer above 10 MFLOP, weights hot and cold, a call is timed in the package's pool, and
simulated: from its parts, each timed alone on one core, and from the model of `space/model.py`,
which times nothing. Printed are the errors, and the median of their sizes. On one thread, the
first is how far two timings of the same call differ. Times are the least of several rounds, in
which the two take turns. `--write` also puts the table into docs/scaling.md.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from markdown_tables import table_head, table_row
from scaling_page import Layer, layers_of, machine_text, parse_options, write_section

from gemm_tuner.bench.parts import PartsTimer
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.topology import Level
from gemm_tuner.domain.units import time_text
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.topology import detect_topology
from gemm_tuner.scaling.server import server_here
from gemm_tuner.scaling.simulate import predicted_part_ns, simulated, traffic_of

ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A call: its time, and those of a simulation from parts and from the model."""

    threads: int
    regime: Regime
    timed_ns: float
    from_parts_ns: float
    from_model_ns: float

    @property
    def errors(self) -> tuple[float, float]:
        """Return how much longer the simulated calls take, as shares of the timed one."""
        return (
            self.from_parts_ns / self.timed_ns - 1,
            self.from_model_ns / self.timed_ns - 1,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each layer, regime and number of threads."""
    options = parse_options(__doc__, arguments)
    end_s = time.monotonic() + options.seconds
    layers = list(layers_of(options.layers, options.dtype))
    columns = ("Layer", "Weights", "Threads", "Timed", "From its parts", "By the model")
    lines = list(table_head(columns))
    print("\n".join(lines), flush=True)
    found: list[Compared] = []
    for number, layer in enumerate(layers):
        budget_s = (end_s - time.monotonic()) / (len(layers) - number)
        for one in _compare(layer, layer.timer(), budget_s):
            found.append(one)
            lines.append(_row(layer, one))
            print(lines[-1], flush=True)
    summary = list(_summary(found))
    print("\n".join(["", *summary]))
    if options.write:
        text = "\n".join([f"{machine_text()}.", "", *summary, "", *lines])
        write_section("simulation error", text)


def _compare(layer: Layer, timer: PartsTimer, budget_s: float) -> Iterator[Compared]:
    topology = detect_topology()
    server = server_here(detect_cpu(), topology)
    counts = range(1, min(topology.usable_cpus, topology.count(Level.CORE)) + 1)
    asked = [(threads, regime) for regime in Regime for threads in counts]
    end_s = time.monotonic() + budget_s
    for number, (threads, regime) in enumerate(asked):
        traffic = traffic_of(
            layer.problem,
            layer.candidate,
            server,
            threads=threads,
            m=layer.problem.m.high,
            regime=regime,
        )
        timed, parts = [], []
        share_s = (end_s - time.monotonic()) / (len(asked) - number)
        begin_s = time.monotonic()
        for turn in range(ROUNDS):
            timed.append(timer.call_ns(threads, regime))
            found = timer.times_ns(threads, traffic.turns, regime)
            parts.append(simulated(traffic, found).time_ns)
            if (time.monotonic() - begin_s) / (turn + 1) * (turn + 2) > share_s:
                break
        yield Compared(
            threads=threads,
            regime=regime,
            timed_ns=min(timed),
            from_parts_ns=min(parts),
            from_model_ns=simulated(traffic, predicted_part_ns(traffic)).time_ns,
        )


def _row(layer: Layer, one: Compared) -> str:
    return table_row(
        layer.name,
        _where(one.regime),
        str(one.threads),
        time_text(one.timed_ns),
        *(f"{error:+.1%}" for error in one.errors),
    )


def _summary(found: Sequence[Compared]) -> Iterator[str]:
    yield from table_head(("Weights", "Threads", "Calls", "Median error", "That of the model"))
    groups = dict.fromkeys((one.regime, one.threads) for one in found)
    for regime, threads in groups:
        some = [one for one in found if (one.regime, one.threads) == (regime, threads)]
        yield _median_row(_where(regime), str(threads), some)
    yield _median_row("all", "all", found)


def _median_row(regime: str, threads: str, some: Sequence[Compared]) -> str:
    sizes = [[abs(error) for error in one.errors] for one in some]
    medians = [median(errors) for errors in zip(*sizes, strict=True)]
    return table_row(regime, threads, str(len(some)), *(f"{size:.1%}" for size in medians))


def _where(regime: Regime) -> str:
    return "hot" if regime is Regime.HOT else "cold"


if __name__ == "__main__":
    main()
