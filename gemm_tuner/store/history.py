"""Reading all that was tried, one problem after the other, in one snapshot."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, select

from gemm_tuner.derive import SweepKey
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.store.problems import read_problem
from gemm_tuner.store.reading import read_trial, select_trials, why_not_believed
from gemm_tuner.store.sql.scan import count_rows, read_chunks, snapshot
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import Origin, problems, sweep_ends, trials


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrial:
    """A trial, where it was run, and whether it is a reason to serve a kernel if it was run here.

    What was run here and is correct is such a reason where a `key` that is believed attests it.
    """

    trial: Trial
    origin: Origin
    is_believed: bool
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemHistory:
    """All trials of a problem in the order of insertion, and its sweeps that came to their end."""

    problem: Problem
    trials: tuple[StoredTrial, ...]
    exhausted: frozenset[SweepKey]


class History(Statements):
    """All that was tried into one database or imported."""

    def problems(
        self, tell: Callable[[int, int], None] = lambda _done, _total: None
    ) -> Iterator[ProblemHistory]:
        """Yield the history of each problem; `tell` hears how many are read, of how many."""
        with snapshot(self._engine) as connection:
            total, done = count_rows(connection, problems), 0
            exhausted = _exhausted_sweeps(connection)
            for chunk in read_chunks(connection, problems, (problems.c.id, problems.c.document)):
                for row in chunk:
                    yield ProblemHistory(
                        problem=read_problem(row["id"], row["document"]),
                        trials=tuple(self._trials_of(connection, row["id"])),
                        exhausted=frozenset(exhausted[row["id"]]),
                    )
                    done += 1
                    tell(done, total)

    def _trials_of(self, connection: Connection, key: str) -> Iterator[StoredTrial]:
        query = select_trials().where(trials.c.problem_id == key)
        for row in connection.execute(query).mappings():
            trial, origin = read_trial(row), Origin(row["origin"])
            yield StoredTrial(
                trial=trial,
                origin=origin,
                is_believed=origin is Origin.MEASURED
                and why_not_believed(self._keys, trial, row) is None,
                key=row["attested_by"],
            )


def _exhausted_sweeps(connection: Connection) -> dict[str, set[SweepKey]]:
    """Return the sweeps that came to the end of their search, by the key of their problem."""
    ends = sweep_ends.c
    query = select(
        ends.problem_id,
        ends.cpu_key,
        ends.threads,
        ends.regime,
        ends.toolchain,
        ends.generator,
        ends.baseline,
    ).where(ends.packed_format == "", ends.is_exhausted)
    found: dict[str, set[SweepKey]] = defaultdict(set)
    for key, cpu_key, threads, regime, toolchain, generator, baseline in connection.execute(query):
        context = ExecutionContext(threads=threads, regime=Regime(regime))
        found[key].add((cpu_key, context, toolchain, generator, baseline))
    return found
