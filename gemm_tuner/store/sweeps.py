"""Reading and writing how sweeps ended."""

from sqlalchemy import delete, select

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import SweepEnd
from gemm_tuner.store.problems import insert_problem, problem_id
from gemm_tuner.store.sql.statements import Statements, insert_new
from gemm_tuner.store.sql.tables import sweep_ends
from gemm_tuner.store.verdicts.deriving import Deriving


class Sweeps(Statements):
    """The completed sweeps of one database."""

    def mark_ended(
        self,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        *,
        toolchain: str,
        generator: str,
        end: SweepEnd,
        packed_format: str = "",
    ) -> None:
        """Note how a sweep ended; an earlier end of it beside the same baseline is replaced.

        It was of all formats of packed weights, or of the one that is named.
        """
        with self._writing() as connection:
            insert_problem(connection, problem)
            key = {
                **_sweep_key(problem, cpu_key, context, toolchain, generator),
                "packed_format": packed_format,
                "baseline": end.baseline,
            }
            connection.execute(delete(sweep_ends).filter_by(**key))
            insert_new(
                connection,
                sweep_ends,
                **key,
                is_exhausted=end.is_exhausted,
                budget_s=end.budget_s,
            )
            Deriving(connection, self._keys).follow_sweep_end(problem, cpu_key)

    def sweep_ends(
        self,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        *,
        toolchain: str,
        generator: str,
        packed_format: str = "",
    ) -> tuple[SweepEnd, ...]:
        """Return how such sweeps ended, one for each baseline, that of most time first."""
        query = (
            select(sweep_ends.c.baseline, sweep_ends.c.is_exhausted, sweep_ends.c.budget_s)
            .filter_by(**_sweep_key(problem, cpu_key, context, toolchain, generator))
            .filter_by(packed_format=packed_format)
            .order_by(sweep_ends.c.budget_s.desc())
        )
        with self._reading() as connection:
            return tuple(
                SweepEnd(baseline=baseline, is_exhausted=is_exhausted, budget_s=budget_s)
                for baseline, is_exhausted, budget_s in connection.execute(query)
            )


def _sweep_key(
    problem: Problem, cpu_key: str, context: ExecutionContext, toolchain: str, generator: str
) -> dict[str, str | int]:
    return {
        "problem_id": problem_id(problem),
        "cpu_key": cpu_key,
        "threads": context.threads,
        "regime": context.regime.value,
        "toolchain": toolchain,
        "generator": generator,
    }
