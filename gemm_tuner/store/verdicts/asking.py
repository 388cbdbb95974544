"""The query for all rows that may answer questions, and what it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import index, itemgetter
from typing import Any, Self, cast

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Dialect,
    FromClause,
    Integer,
    LargeBinary,
    Row,
    ScalarSelect,
    Select,
    String,
    and_,
    bindparam,
    case,
    column,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    values,
)
from sqlalchemy import cast as cast_to
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.types import TypeEngine

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.sql.tables import artifacts, revocations, verdicts
from gemm_tuner.store.verdicts.deriving import layer_id
from gemm_tuner.store.verdicts.ready import sealed_about

MAX_TOGETHER = 16
_LARGE_GROUP = 128  # of a batch: one query takes 0.4 ms beside what each question does
_MOST_IN_ARRAYS = 256
_MAX_ANSWER_BYTES = 2**16
_SEALING_KEY = bindparam("sealing_key", type_=String())
_Columns = ReadOnlyColumnCollection[str, Any]

# What is asked: for whom, and where.
Asking = tuple[Problem, Cpu, ExecutionContext]


@dataclass(frozen=True, slots=True)
class ReadyAnswer:
    """The answer to a question as `Unsigned.packed` gives it, and its serial."""

    content: bytes
    serial: int


@dataclass(frozen=True, slots=True)
class SealedAnswer:
    """An answer that looks ready, what it is to be about, and its serial."""

    about: bytes
    sealed: bytes
    serial: int


@dataclass(slots=True)
class Found:
    """A question, and the rows that may answer it, as they are in the database.

    Where there is an answer that looks ready, it is in the place of the rows.
    """

    problem: Problem
    problem_key: str
    cpu: Cpu
    cpu_key: str
    context: ExecutionContext
    rows: list[Row[Any]] = field(default_factory=list)
    answer: SealedAnswer | None = None

    @classmethod
    def nothing(cls, problem: Problem, cpu: Cpu, context: ExecutionContext) -> Self:
        """Return a question without rows."""
        return cls(problem, problem_id(problem), cpu, cpu.exact_key, context)

    def add(self, row: Row[Any]) -> None:
        """Add a row of the query."""
        sealed, serial, attestation, digest, document, signature = tuple(row)[1:7]
        if sealed is not None:
            named = None if digest is None else (digest, document, signature)
            try:
                about = sealed_about(
                    self.problem_key,
                    self.cpu_key,
                    self.context,
                    attestation=attestation,
                    artifact=named,
                )
                self.answer = SealedAnswer(about, bytes(sealed), max(0, index(serial)))
            except (TypeError, AttributeError):  # SQLite keeps a value of any type in any column
                self.answer = SealedAnswer(b"", b"", 0)
        elif row.problem_id is not None:
            self.rows.append(row)


def add_rows(connection: Connection, asked: Sequence[Found], sealing_key: str) -> None:
    """Add what answers questions to them: one query for `MAX_TOGETHER`, or for more at once.

    An answer looks ready that the user with a measuring key sealed, if the same user attests the
    kernel that it names, and it is not revoked. With an empty key, none does.
    """
    has_arrays = connection.dialect.name == "postgresql"
    begin = 0
    while begin < len(asked):
        end = begin + _group_size(len(asked) - begin, has_arrays=has_arrays)
        _add_rows(connection, asked[begin:end], sealing_key, has_arrays=has_arrays)
        begin = end


def _group_size(left: int, *, has_arrays: bool) -> int:
    """Return how many of the questions that are left one query asks at most.

    Without arrays, each size is a query of its own, so that there are few.
    """
    if has_arrays:
        return _MOST_IN_ARRAYS
    return _LARGE_GROUP if left >= _LARGE_GROUP else MAX_TOGETHER


def _add_rows(
    connection: Connection, asked: Sequence[Found], sealing_key: str, *, has_arrays: bool
) -> None:
    dialect = cast("Callable[[], Dialect]", type(connection.dialect))
    facts = [_facts(one) for one in asked]
    parameters: dict[str, Any] | tuple[Any, ...]
    if has_arrays:
        text = _array_query(dialect)
        columns = map(list, zip(*facts, strict=True))
        parameters = {_SEALING_KEY.key: sealing_key, **dict(zip(_ASKED, columns, strict=True))}
    else:
        text, in_order = _row_query(dialect, len(facts))
        parameters = in_order((sealing_key, *chain.from_iterable(facts)))
    for row in connection.exec_driver_sql(text, parameters).all():
        asked[row[0] - 1].add(row)


def _is_lifted(artifact: ColumnElement[str]) -> ScalarSelect[bool]:
    """Return whether the last revocation of an artifact is lifted, NULL if there is none."""
    return (
        select(revocations.c.is_lifted)
        .where(revocations.c.subject == artifact)
        .order_by(revocations.c.number.desc())
        .limit(literal_column("1"))  # no parameters: those of the query are its questions
        .offset(literal_column("0"))
        .scalar_subquery()
    )


_ASKED: dict[str, TypeEngine[Any]] = {
    "problem": String(),
    "layer": String(),
    "model": String(),
    "cpu": String(),
    "threads": Integer(),
    "regime": String(),
    "low": Integer(),
    "high": Integer(),
}


def _facts(one: Found) -> tuple[str | int, ...]:
    """Return what is asked, in the order of `_ASKED`."""
    problem, context = one.problem, one.context
    return (
        one.problem_key,
        layer_id(problem),
        one.cpu.model_key,
        one.cpu_key,
        context.threads,
        context.regime.value,
        problem.m.low,
        problem.m.high,
    )


# Queries are text in the form of the driver, as what SQLAlchemy does around such a query takes
# longer than the query.


@lru_cache
def _array_query(dialect: Callable[[], Dialect]) -> str:
    """Return the query of PostgreSQL for any number of questions: an array for each fact.

    One text, since to plan a query takes longer than to run it, and the server keeps few plans. It
    does not look into an array that is selected, and so keeps one plan for any length: by keys. Of
    many questions, it would read the whole table where it has no statistics.
    """
    arrays = (bindparam(name, type_=ARRAY(kind)) for name, kind in _ASKED.items())
    each = (select(array).scalar_subquery() for array in arrays)
    columns = (column(name, kind) for name, kind in _ASKED.items())
    asked = func.unnest(*each).table_valued(*columns, with_ordinality="number")
    return str(_statement(asked.render_derived(name="asked")).compile(dialect=dialect()))


@lru_cache
def _row_query(
    dialect: Callable[[], Dialect], count: int
) -> tuple[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]]:
    """Return the query for that many questions, and what puts their facts into its order.

    It takes the sealing key and then the facts of each question.
    """
    columns = [column(name, kind) for name, kind in _ASKED.items()]
    questions = [
        (
            literal_column(str(number), Integer()),
            *(bindparam(f"{name}{number}", type_=kind) for name, kind in _ASKED.items()),
        )
        for number in range(1, count + 1)
    ]
    asked = values(column("number", Integer()), *columns, name="asked").data(questions).cte("asked")
    compiled = _statement(asked).compile(dialect=dialect())
    given = [_SEALING_KEY.key]
    given += [f"{name}{number}" for number in range(1, count + 1) for name in _ASKED]
    assert compiled.positiontup is not None
    return str(compiled), itemgetter(*map(given.index, compiled.positiontup))


def _statement(asked_each: FromClause) -> Select[Any]:
    """Return the query for the rows of each question, which come with its number, from 1 on."""
    asked, row = asked_each.c, verdicts.c
    ready, same = verdicts.alias("ready"), verdicts.alias("same")
    own, of_class = artifacts.alias("own"), artifacts.alias("of_class")
    named = artifacts.alias("named")
    is_same = _answers(same.c, asked, problem=asked.problem, layer=asked.layer)
    serial = select(func.max(same.c.serial)).where(is_same).scalar_subquery()
    # The kernel that the answer names, if who asks attests it and nobody revoked it.
    is_named = and_(
        named.c.sha256 == ready.c.artifact,
        named.c.attested_by == _SEALING_KEY,
        func.coalesce(_is_lifted(ready.c.artifact), true()),
    )
    looks_ready = and_(
        ready.c.answer.is_not(None),
        or_(ready.c.artifact.is_(None), named.c.sha256.is_not(None)),
    )
    # Where it does, no other row is looked for: to read and copy documents takes longer than all
    # else. No row has the key NULL, which spares both databases the search.
    problem, layer = (
        case((looks_ready, null()), else_=key) for key in (asked.problem, asked.layer)
    )
    may_answer = _answers(row, asked, problem=problem, layer=layer)
    return select(
        asked.number,
        # As bytes, whatever it is: text that is none cannot be read.
        case((looks_ready, cast_to(ready.c.answer, LargeBinary()))).label("answer"),
        case((looks_ready, serial)).label("ready_serial"),
        case((looks_ready, ready.c.attestation)).label("ready_attestation"),
        case((looks_ready, named.c.sha256)).label("named_sha256"),
        case((looks_ready, named.c.document)).label("named_document"),
        case((looks_ready, named.c.attestation)).label("named_attestation"),
        *(each for each in row if each is not row.answer),
        own.c.document.label("own_document"),
        own.c.attested_by.label("own_attested_by"),
        own.c.attestation.label("own_attestation"),
        _is_lifted(row.artifact).label("own_is_lifted"),
        _is_lifted(row.class_artifact).label("of_class_is_lifted"),
        of_class.c.document.label("of_class_document"),
        of_class.c.attested_by.label("of_class_attested_by"),
        of_class.c.attestation.label("of_class_attestation"),
    ).select_from(
        asked_each.outerjoin(ready, _is_of(ready.c, asked))
        .outerjoin(named, is_named)
        .outerjoin(verdicts, may_answer)
        .outerjoin(own, own.c.sha256 == row.artifact)
        .outerjoin(of_class, of_class.c.sha256 == row.class_artifact)
    )


def _answers(
    row: _Columns, asked: _Columns, *, problem: ColumnElement[str], layer: ColumnElement[str]
) -> ColumnElement[bool]:
    """Return the condition that a row may tell something of what is asked, by these keys of it."""
    same_context = and_(row.threads == asked.threads, row.regime == asked.regime)
    same_problem = and_(row.problem_id == problem, same_context, row.model_key == asked.model)
    range_around = and_(
        row.range_of == layer,
        row.cpu_key == asked.cpu,
        same_context,
        row.m_low <= asked.low,
        row.m_high >= asked.high,
    )
    hint = row.hint_of == problem
    return or_(same_problem, range_around, hint)


def _is_of(row: _Columns, asked: _Columns) -> ColumnElement[bool]:
    """Return the condition that a row is of exactly what is asked, and sealed by who asks."""
    return and_(
        row.problem_id == asked.problem,
        row.threads == asked.threads,
        row.regime == asked.regime,
        row.model_key == asked.model,
        row.cpu_key == asked.cpu,
        row.attested_by == _SEALING_KEY,
        literal_column("''") != _SEALING_KEY,
        row.answer.is_not(None),
        func.length(row.answer) <= literal_column(str(_MAX_ANSWER_BYTES)),
    )
