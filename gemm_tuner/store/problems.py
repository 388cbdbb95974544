"""Reading and writing the problems that were tried."""

from functools import lru_cache

from sqlalchemy import ColumnElement, Connection, and_, select

from gemm_tuner.domain.canonical import canonical_json, identity
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.integrity import check_document
from gemm_tuner.store.sql.statements import Statements, insert_new
from gemm_tuner.store.sql.tables import problems


class Problems(Statements):
    """The problems of one database."""

    def exact_of(self, problem: Problem) -> tuple[Problem, ...]:
        """Return the known problems for one m that differ from `problem` in m alone."""
        query = select(problems.c.id, problems.c.document).where(same_layer(problem))
        with self._reading() as connection:
            known = tuple(read_problem(key, text) for key, text in connection.execute(query))
        layer = problem.layer_text
        return tuple(
            one
            for one in known
            if one.m.exact is not None and one != problem and one.layer_text == layer
        )


def problem_id(problem: Problem) -> str:
    """Return the key of a problem."""
    return _identity_of(problem.text)


# Many machines ask for the layers of one model.
_identity_of = lru_cache(maxsize=8192)(identity)


def same_layer(problem: Problem) -> ColumnElement[bool]:
    """Return the condition that a row differs from `problem` in what has no column at most.

    That is m, the reduction and the operation.
    """
    return and_(
        problems.c.n == problem.n,
        problems.c.k == problem.k,
        problems.c.types == problem.types.text,
        problems.c.w_layout == problem.layout_text,
        problems.c.epilogue == problem.epilogue.text,
    )


def insert_problem(connection: Connection, problem: Problem) -> None:
    """Insert a problem unless it is there."""
    insert_new(
        connection,
        problems,
        id=problem_id(problem),
        document=canonical_json(problem.text),
        n=problem.n,
        k=problem.k,
        types=problem.types.text,
        w_layout=problem.layout_text,
        epilogue=problem.epilogue.text,
    )


def read_problem(key: str, document: str) -> Problem:
    """Return the problem of a row."""
    check_document("problem", key, document)
    return Problem.parse(document.strip('"'))
