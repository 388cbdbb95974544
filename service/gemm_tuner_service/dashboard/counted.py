"""What is counted of all verdicts, as pages show it: rows of tables, and pictures of them."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import TypeVar

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.store.tallies import ROWS_UP_TO, WEIGHTS_UP_TO, ShapeTally, Step, Tallies, Tally
from gemm_tuner.store.verdicts.figures import Standing
from gemm_tuner_service.dashboard import drawings
from gemm_tuner_service.dashboard.pictures import PICTURES, Picture

_Key = TypeVar("_Key", bound=Hashable)

MARKS = tuple(Standing)
MAX_DRAWN = 24  # bars of a picture


@dataclass(frozen=True, slots=True)
class Counts:
    """How many verdicts there are of each standing, and of none that is believed."""

    of: dict[Standing | None, int]

    @classmethod
    def sum_of(cls, tallies: Iterable[Tally]) -> "Counts":
        """Return all that some tallies count together."""
        of: dict[Standing | None, int] = {}
        for tally in tallies:
            of[tally.standing] = of.get(tally.standing, 0) + tally.count
        return cls(of)

    @property
    def each(self) -> tuple[int, ...]:
        """Return how many there are of each standing, in the order of `MARKS`."""
        return tuple(self.of.get(mark, 0) for mark in MARKS)

    @property
    def total(self) -> int:
        """Return how many are believed to be measured."""
        return sum(self.each)

    @property
    def unattested(self) -> int:
        """Return how many are attested with keys that are not believed here."""
        return self.of.get(None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The counts of one thing: its name, and for CPUs the key."""

    name: str
    counts: Counts
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Rows of a histogram, with a count of each standing, and its picture."""

    rows: Sequence[tuple[str, tuple[int, ...]]]
    picture: Picture | None


def of_cpus(tallies: Tallies, names: Mapping[str, str]) -> list[Row]:
    """Return the counts of each CPU, that with the most first."""
    found = _grouped((tally.cpu_key, tally) for tally in tallies.groups)
    rows = [Row(name=names[key], key=key, counts=counts) for key, counts in found.items()]
    return sorted(rows, key=lambda row: (-row.counts.total, row.key))


def of_kinds(tallies: Tallies) -> list[tuple[str, ExecutionContext, Counts]]:
    """Return the counts of each type of elements in each context."""
    found = _grouped(((tally.types, tally.context), tally) for tally in tallies.groups)
    order = sorted(found, key=lambda kind: (kind[0], kind[1].threads, kind[1].regime))
    return [(types, context, found[types, context]) for types, context in order]


def of_shapes(tallies: Tallies) -> list[tuple[str, str, str, Counts]]:
    """Return the counts of each type, class of m and class of the elements of w."""
    found = _grouped(
        ((tally.types, tally.rows_class, tally.weights_class), tally) for tally in tallies.shapes
    )
    return [
        (types, _rows_text(of_rows), _weights_text(of_weights), counts)
        for (types, of_rows, of_weights), counts in sorted(found.items())
    ]


def cpus_picture(rows: Sequence[Row]) -> Picture | None:
    """Return bars of the counts of CPUs, by their keys where several have the same name."""
    count = Counter(row.name for row in rows)
    bars = [row if count[row.name] == 1 else replace(row, name=row.key) for row in rows]
    return _bars(bars, "Answers of each CPU; the table below has the figures.")


def shapes_picture(tallies: Tallies) -> Picture | None:
    """Return bars of the counts of each type of elements and class of m."""

    def name_of(tally: ShapeTally) -> tuple[str, int]:
        return tally.types, tally.rows_class

    found = _grouped((name_of(tally), tally) for tally in tallies.shapes)
    rows = [
        Row(name=f"{types}, m {_rows_text(of_rows)}", counts=counts)
        for (types, of_rows), counts in sorted(found.items())
    ]
    return _bars(
        rows, "Answers of each type of elements and class of m; the table below has the figures."
    )


def ratio_steps(tallies: Tallies, whose: str = "all") -> Steps:
    """Return how many verdicts of a CPU, or of all, have which speed over the baseline."""
    steps = [replace(one, low=exp(one.low), high=exp(one.high)) for one in tallies.ratios]
    return _steps(
        steps,
        "{:.3f}",
        "times the speed of the baseline (logarithmic)",
        whose,
        is_logarithmic=True,
    )


def share_steps(tallies: Tallies, whose: str = "all") -> Steps:
    """Return how many verdicts of a CPU, or of all, have which share of the peak."""
    return _steps(
        tallies.shares,
        "{:.0%}",
        "of the peak of arithmetic, measured beside the kernel",
        whose,
        is_logarithmic=False,
    )


def _steps(
    steps: Sequence[Step],
    form: str,
    axis: str,
    whose: str,
    *,
    is_logarithmic: bool,
) -> Steps:
    names = {one.low: _span_text(one, form) for one in steps}
    counts: dict[float, dict[Standing, int]] = {}
    for step in steps:
        counts.setdefault(step.low, {})[step.standing] = step.count
    rows = [
        (names[low], tuple(of_step.get(mark, 0) for mark in MARKS))
        for low, of_step in sorted(counts.items())
    ]
    if not steps:
        return Steps(rows=rows, picture=None)
    picture = PICTURES.ask(
        f"histogram of {whose}, {axis}",
        drawings.histogram,
        tuple((one.standing.value, one.low, one.high, one.count) for one in steps),
        axis,
        f"Answers by their speed, {axis}; the table below has the figures.",
        is_logarithmic,
    )
    return Steps(rows=rows, picture=picture)


def _span_text(step: Step, form: str) -> str:
    low, high = form.format(step.low), form.format(step.high)
    if step.beyond:
        return f"below {high}" if step.beyond < 0 else f"{low} and more"
    return f"{low} to {high}"


def _bars(rows: Sequence[Row], says: str) -> Picture | None:
    counted = [row for row in rows if row.counts.total]
    drawn = counted[:MAX_DRAWN]
    if not drawn:
        return None
    is_cut = len(counted) > len(drawn)
    axis = f"answers, of the first {len(drawn)} in the table" if is_cut else "answers"
    bars = tuple((row.name, _marked(row.counts)) for row in drawn)
    return PICTURES.ask(f"bars: {says}", drawings.bars, bars, axis, says)


def _marked(counts: Counts) -> tuple[tuple[str, int], ...]:
    marked = zip(MARKS, counts.each, strict=True)
    return tuple((mark.value, count) for mark, count in marked if count)


def _grouped(tallies: Iterable[tuple[_Key, Tally]]) -> dict[_Key, Counts]:
    found: dict[_Key, list[Tally]] = {}
    for key, tally in tallies:
        found.setdefault(key, []).append(tally)
    return {key: Counts.sum_of(each) for key, each in found.items()}


def _rows_text(of_rows: int) -> str:
    """Return a class of m as words: `9 to 64`."""
    if not of_rows:
        return f"up to {ROWS_UP_TO[0]}"
    if of_rows == len(ROWS_UP_TO):
        return f"above {ROWS_UP_TO[-1]}"
    return f"{ROWS_UP_TO[of_rows - 1] + 1} to {ROWS_UP_TO[of_rows]}"


def _weights_text(of_weights: int) -> str:
    """Return a class of the elements of w as words: `up to 2^20`."""
    powers = [most.bit_length() - 1 for most in WEIGHTS_UP_TO]
    if of_weights == len(powers):
        return f"above 2^{powers[-1]}"
    return f"up to 2^{powers[of_weights]}"
