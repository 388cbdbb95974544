"""Reading verdicts and trials some at a time, for pages: of a CPU, of a problem, of a layer."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps, loads
from math import isfinite
from typing import Any, Self

from sqlalchemy import Row, Select, select, tuple_

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.integrity import check_types
from gemm_tuner.store.problems import problem_id, read_problem
from gemm_tuner.store.reading import read_trial, select_trials, usable_keys
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import Origin, cpus, problems, trials, verdicts
from gemm_tuner.store.verdicts.deriving import layer_id
from gemm_tuner.store.verdicts.figures import Standing, ratio_of

MAX_PLACES = 200  # of one problem: CPUs, threads and regimes
MAX_CURVE_SIDE = 20  # other m that are smaller, and that are greater
_MAX_CURSOR = 400
_IS_OWN = (verdicts.c.imported == 0) | (verdicts.c.newest > 0)  # not of imports alone
_MAX_CPU_ROWS = 50  # a CPU has one for each brand and number of cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A verdict as a list shows it, by its columns.

    Where nothing was confirmed, there are no figures, and no standing. `is_attested` is false where
    the key that attests it is not believed here.
    """

    problem: Problem
    cpu_key: str
    context: ExecutionContext
    standing: Standing | None
    ratio: float | None
    peak_share: float | None
    call_ns: float | None
    is_attested: bool

    @property
    def key(self) -> str:
        """Return the key of the problem."""
        return problem_id(self.problem)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page of verdicts of a CPU begins: behind the row with these values."""

    log_ratio: float
    problem_key: str
    threads: int
    regime: str

    @property
    def text(self) -> str:
        """Return the text that `parse` reads back."""
        values = (self.log_ratio, self.problem_key, self.threads, self.regime)
        return urlsafe_b64encode(dumps(values).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor written as `text`.

        Raises:
            InvalidSetting: it is none.
        """
        try:
            if len(text) > _MAX_CURSOR:
                raise ValueError  # noqa: TRY301 - answered below as what is not understood
            padded = text + "=" * (-len(text) % 4)
            log_ratio, key, threads, regime = loads(urlsafe_b64decode(padded.encode("ascii")))
            bytes.fromhex(key)
            cursor = cls(float(log_ratio), str(key), ExecutionContext(threads=threads).threads, "")
            if not isfinite(cursor.log_ratio):
                raise ValueError  # noqa: TRY301
            return cls(cursor.log_ratio, cursor.problem_key, cursor.threads, Regime(regime).value)
        except (ValueError, TypeError, RecursionError, OverflowError, InvalidSetting):
            raise InvalidSetting(
                "the cursor is none of this list; begin at the first page again."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPage:
    """Some verdicts of a CPU, and where the next page begins, if there is one."""

    rows: tuple[Listed, ...]
    next_cursor: Cursor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPage:
    """Some trials, the newest first, and where the next page begins, if there is one."""

    trials: tuple[Trial, ...]
    next_before: int | None


class Listing(Statements):
    """Lists what one database holds. Of trials, only those are listed that were run into it."""

    def of_cpu(
        self,
        cpu_key: str,
        *,
        limit: int,
        after: Cursor | None = None,
        standing: Standing | None = None,
    ) -> ListedPage:
        """Return verdicts of a CPU, those of the greatest ratio first."""
        row = verdicts.c
        order = (row.log_ratio, row.problem_id, row.threads, row.regime)
        query = _select_listed().where(row.cpu_key == cpu_key, row.log_ratio.is_not(None))
        if after is not None:
            place = (after.log_ratio, after.problem_key, after.threads, after.regime)
            query = query.where(tuple_(*order) < tuple_(*place))
        if standing is not None:
            query = query.where(row.standing == standing.value)
        query = query.order_by(*(column.desc() for column in order)).limit(limit + 1)
        with self._reading() as connection:
            found = connection.execute(query).all()
            return ListedPage(
                rows=self._listed(found[:limit]),
                next_cursor=_cursor_of(found[limit - 1]) if len(found) > limit else None,
            )

    def problem(self, key: str) -> Problem | None:
        """Return the problem with this key that something was tried of, or imported."""
        row = self._first(select(problems.c.id, problems.c.document).where(problems.c.id == key))
        return None if row is None else read_problem(row[0], row[1])

    def has_cpu(self, cpu_key: str) -> bool:
        """Return whether something was tried on a CPU, here and not elsewhere."""
        row = verdicts.c
        query = select(row.problem_id).where(row.cpu_key == cpu_key, _IS_OWN)
        return self._first(query.limit(1)) is not None

    def of_problem(
        self,
        key: str,
        *,
        cpu_key: str | None = None,
        threads: int | None = None,
        regime: Regime | None = None,
    ) -> tuple[Listed, ...]:
        """Return what was tried of a problem, for each CPU and context, at most `MAX_PLACES`.

        A CPU, a number of threads or a regime leaves out the places with another.
        """
        row = verdicts.c
        asked = {row.cpu_key: cpu_key, row.threads: threads, row.regime: regime}
        query = (
            _select_listed()
            .where(row.problem_id == key, _IS_OWN)
            .where(*(column == value for column, value in asked.items() if value is not None))
            .order_by(row.cpu_key, row.threads, row.regime)
            .limit(MAX_PLACES)
        )
        with self._reading() as connection:
            return self._listed(connection.execute(query).all())

    def range_with(self, problem: Problem) -> str | None:
        """Return the key of the narrowest range of m tried here that holds that of a problem."""
        row, m = verdicts.c, problem.m
        query = (
            select(row.problem_id)
            .where(row.range_of == layer_id(problem), row.m_low <= m.low, row.m_high >= m.high)
            .where(_IS_OWN)
            .order_by(row.m_high - row.m_low, row.problem_id)
        )
        found = self._first(query.limit(1))
        return None if found is None else str(found[0])

    def of_layer(
        self, problem: Problem, cpu_key: str, context: ExecutionContext
    ) -> tuple[Listed, ...]:
        """Return verdicts for this and other m, all else the same, in the order of m.

        There are at most `MAX_CURVE_SIDE` of smaller m and as many of greater, the nearest.
        """
        row, m = verdicts.c, problem.m.high
        query = _select_listed().where(
            row.layer == layer_id(problem),
            row.cpu_key == cpu_key,
            row.threads == context.threads,
            row.regime == context.regime.value,
            row.log_ratio.is_not(None),
        )
        below = query.where(row.m_high < m).order_by(row.m_high.desc()).limit(MAX_CURVE_SIDE)
        above = query.where(row.m_high >= m).order_by(row.m_high).limit(MAX_CURVE_SIDE + 1)
        with self._reading() as connection:
            smaller, greater = connection.execute(below).all(), connection.execute(above).all()
            return self._listed([*reversed(smaller), *greater])

    def tried(
        self,
        key: str,
        cpu_key: str,
        context: ExecutionContext,
        *,
        limit: int,
        before: int | None = None,
    ) -> TriedPage:
        """Return trials of a problem on a CPU in a context, the newest first."""
        each = select(cpus.c.id).where(cpus.c.exact_key == cpu_key).limit(_MAX_CPU_ROWS)
        row = trials.c
        query = (
            select_trials()
            .order_by(None)
            .order_by(row.sequence.desc())
            .where(
                row.problem_id == key,
                row.threads == context.threads,
                row.regime == context.regime.value,
                row.origin == Origin.MEASURED.value,
            )
            .limit(limit + 1)
        )
        if before is not None:
            query = query.where(row.sequence < before)
        with self._reading() as connection:
            # One query for each, so that an index has the rows in their order.
            found = [
                each_row
                for cpu_id in connection.scalars(each).all()
                for each_row in connection.execute(query.where(row.cpu_id == cpu_id)).mappings()
            ]
            found.sort(key=lambda each_row: -each_row["sequence"])
            return TriedPage(
                trials=tuple(read_trial(each_row) for each_row in found[:limit]),
                next_before=found[limit - 1]["sequence"] if len(found) > limit else None,
            )

    def _listed(self, rows: Sequence[Row[Any]]) -> tuple[Listed, ...]:
        with usable_keys():
            believed = self._keys.believed()
        return tuple(_listed_of(row, believed) for row in rows)


def _select_listed() -> Select[Any]:
    row = verdicts.c
    return select(
        row.problem_id,
        problems.c.document.label("problem"),
        row.cpu_key,
        row.threads,
        row.regime,
        row.standing,
        row.log_ratio,
        row.peak_share,
        row.call_ns,
        row.attested_by,
    ).join(problems, problems.c.id == row.problem_id)


def _listed_of(row: Row[Any], believed: frozenset[str]) -> Listed:
    check_types(verdicts, row)
    return Listed(
        problem=read_problem(row.problem_id, row.problem),
        cpu_key=row.cpu_key,
        context=ExecutionContext(threads=row.threads, regime=Regime(row.regime)),
        standing=None if row.standing is None else Standing(row.standing),
        ratio=None if row.log_ratio is None else ratio_of(row.log_ratio),
        peak_share=row.peak_share,
        call_ns=row.call_ns,
        is_attested=row.attested_by in believed,
    )


def _cursor_of(row: Row[Any]) -> Cursor:
    return Cursor(row.log_ratio, row.problem_id, row.threads, row.regime)
