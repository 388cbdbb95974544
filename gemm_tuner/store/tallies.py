"""What a database knows, counted: how many verdicts of which kind there are, and how fast.

It counts by the columns of figures, which nobody attests; what is attested with a key that is not
believed is counted apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, case, cast, func, literal, select

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.store.reading import usable_keys
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import verdicts
from gemm_tuner.store.verdicts.figures import Standing

MAX_GROUPS = 2000
# The classes of m, and of the elements of w: the greatest of each but the last.
ROWS_UP_TO = (1, 8, 64, 512)
WEIGHTS_UP_TO = (2**16, 2**20, 2**24)
RATIOS_PER_E = 20  # steps of the logarithm of the ratio, for each factor of e
RATIO_STEPS = 40  # below and above 1; what is farther away is in the last
SHARES = 20  # steps of the share of the peak; what is above 1 is in the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many verdicts there are of a kind.

    Those with no standing are attested with keys that are not believed here.
    """

    standing: Standing | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTally(Tally):
    """The verdicts of a CPU, for types of elements in a context."""

    cpu_key: str
    types: str
    context: ExecutionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTally(Tally):
    """The verdicts for types of elements, a class of m and one of weights, by their numbers."""

    types: str
    rows_class: int
    weights_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How many verdicts of a standing have a figure that is at least `low` and below `high`.

    The outermost steps also have what lies below, where `beyond` is -1, or above, where it is 1.
    """

    standing: Standing
    low: float
    high: float
    count: int
    beyond: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tallies:
    """All that is counted, of all CPUs or of one."""

    groups: tuple[GroupTally, ...]
    shapes: tuple[ShapeTally, ...]
    ratios: tuple[Step, ...]
    shares: tuple[Step, ...]


class Counting(Statements):
    """Counts the verdicts of one database."""

    def tallies(self, cpu_key: str | None = None) -> Tallies:
        """Return what is counted, of one CPU or of all."""
        with usable_keys():
            believed = sorted(self._keys.believed())
        row, dialect = verdicts.c, self._engine.dialect.name
        standing = case((row.attested_by.in_(believed), row.standing), else_=None)
        # Another name than that of the column, which PostgreSQL would take it for.
        counted = [standing.label("counted_as"), func.count()]
        of_whom: list[ColumnElement[bool]] = [row.standing.is_not(None)]
        of_whom += [] if cpu_key is None else [row.cpu_key == cpu_key]
        rows_class, weights_class = (
            _class_of(row.m_high, ROWS_UP_TO),
            _class_of(row.weights, WEIGHTS_UP_TO),
        )
        with self._reading() as connection:
            groups = connection.execute(
                _grouped(counted, row.cpu_key, row.types, row.threads, row.regime).where(*of_whom)
            ).all()
            shapes = connection.execute(
                _grouped(counted, row.types, rows_class, weights_class).where(*of_whom)
            ).all()
            ratios = connection.execute(
                _grouped(counted, _step_of(row.log_ratio * RATIOS_PER_E, dialect)).where(*of_whom)
            ).all()
            shares = connection.execute(
                _grouped(counted, _step_of(row.peak_share * SHARES, dialect)).where(
                    *of_whom, row.peak_share.is_not(None)
                )
            ).all()
            return Tallies(
                groups=tuple(
                    GroupTally(
                        **_tally(*tally),
                        cpu_key=str(key),  # a damaged row may hold bytes
                        types=str(types),
                        context=ExecutionContext(threads=threads, regime=Regime(regime)),
                    )
                    for key, types, threads, regime, *tally in groups
                ),
                shapes=tuple(
                    ShapeTally(
                        **_tally(*tally), types=types, rows_class=of_rows, weights_class=of_weights
                    )
                    for types, of_rows, of_weights, *tally in shapes
                ),
                ratios=_steps(ratios, RATIOS_PER_E, -RATIO_STEPS, RATIO_STEPS - 1),
                shares=_steps(shares, SHARES, 0, SHARES),
            )


def _grouped(counted: Sequence[Any], *columns: ColumnElement[Any]) -> Select[Any]:
    """Return the query that counts verdicts for each value of the columns and each standing."""
    named = [column.label(f"of_{number}") for number, column in enumerate(columns)]
    keys = [column.name for column in named]
    return (
        select(*named, *counted).group_by(*keys, counted[0].name).order_by(*keys).limit(MAX_GROUPS)
    )


def _class_of(column: ColumnElement[Any], up_to: Sequence[int]) -> ColumnElement[int]:
    """Return the number of the class that a value is in."""
    cases = [(column <= most, literal(number)) for number, most in enumerate(up_to)]
    return case(*cases, else_=literal(len(up_to)))


def _step_of(value: ColumnElement[float], dialect: str) -> ColumnElement[Any]:
    """Return the number of the step that a value is in, from -`RATIO_STEPS` to `RATIO_STEPS`."""
    moved = value + RATIO_STEPS
    bounded = case(
        (moved < 0.0, literal(0.0)),
        (moved > 2.0 * RATIO_STEPS, literal(2.0 * RATIO_STEPS)),
        else_=moved,
    )
    # A cast to integers rounds on PostgreSQL. It cuts on SQLite, which may lack floor.
    whole = cast(bounded, Integer) if dialect == "sqlite" else func.floor(bounded)
    return whole - RATIO_STEPS


def _tally(standing: str | None, count: int) -> dict[str, Any]:
    return {"standing": None if standing is None else Standing(standing), "count": count}


def _steps(rows: Sequence[Any], per_unit: int, first: int, last: int) -> tuple[Step, ...]:
    """Return steps of what is believed; those beyond the first and last are counted to these."""
    counts: dict[tuple[Standing, int], int] = {}
    for number, standing, count in rows:
        if standing is not None:
            key = Standing(standing), min(max(int(number), first), last)
            counts[key] = counts.get(key, 0) + count
    return tuple(
        Step(
            standing=standing,
            low=number / per_unit,
            high=(number + 1) / per_unit,
            count=count,
            beyond=(number == last) - (number == first < 0),
        )
        for (standing, number), count in sorted(counts.items())
    )
