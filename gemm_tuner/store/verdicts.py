"""Finding stored verdicts: one query for all that may answer a question."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    Dialect,
    Integer,
    Row,
    ScalarSelect,
    String,
    and_,
    bindparam,
    column,
    func,
    literal_column,
    or_,
    select,
    values,
)
from sqlalchemy.types import TypeEngine

from gemm_tuner.derive import SweepKey
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem, Rows
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import InvalidProblem
from gemm_tuner.store.deriving import (
    CLASS,
    NO_VERDICT,
    Deriving,
    exhausted_sweeps,
    layer_id,
    statement,
)
from gemm_tuner.store.integrity import attestation_of
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.reading import usable_keys, who_attests
from gemm_tuner.store.statements import RowsDamaged, Statements, translated_errors
from gemm_tuner.store.tables import artifacts, revocations, verdict_state, verdicts
from gemm_tuner.store.verdict_document import load_verdict
from gemm_tuner.trust.attestation import Attestation, Statement
from gemm_tuner.trust.key_id import key_id_of

MAX_TOGETHER = 16  # of many more, PostgreSQL reads the whole table where it has no statistics

# What is asked: for whom, and where.
Asking = tuple[Problem, Cpu, ExecutionContext]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """The document of a verdict with its attestation, and those of the kernel that it names.

    `question` is what the attestation tells beside the text: the kind of document, and the problem,
    CPU and context that it answers. The description of a kernel that is lost is None.
    """

    text: str
    question: tuple[str, str, str, ExecutionContext]
    attestation: Attestation | None
    artifact_sha256: str | None
    artifact_document: str | None
    artifact_attestation: Attestation | None
    is_revoked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVerdict:
    """A stored verdict: where it was measured, and the row that has its documents.

    `newest` is the number of the last trial that decides, 0 if there is none.
    """

    m: Rows
    cpu_key: str
    context: ExecutionContext
    newest: int
    row: Row[Any]

    def own(self) -> StoredDocument | None:
        """Return the document for the CPU where it was measured, if there is one."""
        row = self.row
        if row.document is None:
            return None
        return StoredDocument(
            text=row.document,
            question=("", row.problem_id, row.cpu_key, self.context),
            attestation=attestation_of(row.attested_by, row.attestation),
            artifact_sha256=row.artifact,
            artifact_document=row.own_document,
            artifact_attestation=attestation_of(row.own_attested_by, row.own_attestation),
            is_revoked=row.own_is_lifted is not None and not row.own_is_lifted,
        )

    def of_class(self) -> StoredDocument | None:
        """Return the document for other CPUs of the same class, if there is one."""
        row = self.row
        if row.class_document is None:
            return self.own()
        return StoredDocument(
            text=row.class_document,
            question=(CLASS, row.problem_id, row.cpu_key, self.context),
            attestation=attestation_of(row.class_attested_by, row.class_attestation),
            artifact_sha256=row.class_artifact,
            artifact_document=row.of_class_document,
            artifact_attestation=attestation_of(row.of_class_attested_by, row.of_class_attestation),
            is_revoked=row.of_class_is_lifted is not None and not row.of_class_is_lifted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """All stored verdicts that may answer a question.

    `here` is of this CPU; `siblings` are of its class, the newest first; `ranges` are of this CPU
    for ranges of m that hold the m that was asked, the narrowest first. `has_trials` says
    whether there are any of the problem on this model or from elsewhere, `has_same_model` whether
    on this model with other features. `imported` counts records. `serial` grows with what is known.
    """

    here: KnownVerdict | None
    siblings: tuple[KnownVerdict, ...]
    ranges: tuple[KnownVerdict, ...]
    has_trials: bool
    has_same_model: bool
    has_predictions: bool
    imported: int
    serial: int


class Verdicts(Statements):
    """The verdicts of one database."""

    def known(self, problem: Problem, *, cpu: Cpu, context: ExecutionContext) -> Known:
        """Return all that is stored for a question."""
        [known] = self.known_each([(problem, cpu, context)])
        if isinstance(known, RowsDamaged):
            raise known
        return known

    def known_each(self, questions: Sequence[Asking]) -> Iterator[Known | RowsDamaged]:
        """Yield all that is stored for each of some questions: `MAX_TOGETHER` in one query.

        Where a row of one is damaged, that is what is yielded for it. Text that is none cannot
        even be read, and spoils all of its query.
        """
        for begin in range(0, len(questions), MAX_TOGETHER):
            together = questions[begin : begin + MAX_TOGETHER]
            rows_of: list[list[Row[Any]]] = [[] for _question in together]
            with self._asking_once() as connection:
                dialect = cast("Callable[[], Dialect]", type(connection.dialect))
                text, names = _query(dialect, len(together))
                asked = _asked(together)
                named = asked if names is None else tuple(asked[name] for name in names)
                for row in connection.exec_driver_sql(text, named).all():
                    rows_of[row[0]].append(row)
            for (problem, cpu, context), rows in zip(together, rows_of, strict=True):
                try:
                    with translated_errors():
                        known: Known | RowsDamaged = _sort(rows, problem, cpu, context)
                except RowsDamaged as error:
                    known = error
                yield known

    def verdict_of(
        self,
        stored: StoredDocument,
        *,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        basis: Basis,
    ) -> Verdict | None:
        """Return a stored verdict as the answer to a question; None if it is not to be believed.

        So it is where it is not attested, where a trial that it follows from is not believed any
        more, or where the kernel that it names is lost, revoked or not attested.
        """
        with translated_errors():
            return self._verdict_of(stored, problem, cpu_key, context, basis)

    def _verdict_of(
        self,
        stored: StoredDocument,
        problem: Problem,
        cpu_key: str,
        context: ExecutionContext,
        basis: Basis,
    ) -> Verdict | None:
        attested = statement(*stored.question, stored.text)
        with usable_keys():
            believed = self._keys.believed()
            why_not = self._keys.why_not_believed(Statement.VERDICT, attested, stored.attestation)
        if why_not:
            return None
        if stored.text == NO_VERDICT:
            return None
        verdict, rests_on = load_verdict(
            stored.text, problem=problem, cpu_key=cpu_key, context=context, basis=basis
        )
        if not rests_on <= believed:
            return None
        if verdict.artifact is None:
            return verdict
        sha256, document = verdict.artifact.sha256, stored.artifact_document
        if document is None or sha256 != stored.artifact_sha256 or stored.is_revoked:
            return None
        key, _reason = who_attests(self._keys, sha256, document, stored.artifact_attestation)
        return None if key is None else replace(verdict, attested_by=key_id_of(bytes.fromhex(key)))

    def exhausted(self, problem: Problem) -> frozenset[SweepKey]:
        """Return the sweeps of a problem that came to the end of their search."""
        with self._reading() as connection:
            return exhausted_sweeps(connection, problem)

    def changes(self) -> int:
        """Return a number that grows whenever verdicts change."""
        row = self._first(select(verdict_state.c.changes))
        with translated_errors():
            return 0 if row is None else int(row[0])

    def believed_keys(self) -> frozenset[str]:
        """Return the measuring keys that are believed, in hex; they decide what is served."""
        with usable_keys():
            return self._keys.believed()

    def derive_again(self, tell: Callable[[int, int], None] = lambda _done, _total: None) -> int:
        """Derive all verdicts again from trials, and return how many there are.

        `tell` hears how many problems are done, of how many. Others can read meanwhile, not write.

        Raises:
            InvalidSetting: the measuring keys cannot be used.
        """
        with self._writing() as connection:
            Deriving(connection, self._keys).derive_all(tell)
            query = select(func.count()).where(verdicts.c.document.is_not(None))
            return connection.scalar(query) or 0


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


def _asked(questions: Sequence[Asking]) -> dict[str, str | int]:
    """Return the parameters of `_query`."""
    asked: dict[str, str | int] = {}
    for number, (problem, cpu, context) in enumerate(questions):
        asked |= {
            f"problem{number}": problem_id(problem),
            f"layer{number}": layer_id(problem),
            f"model{number}": cpu.model_key,
            f"cpu{number}": cpu.exact_key,
            f"threads{number}": context.threads,
            f"regime{number}": context.regime.value,
            f"low{number}": problem.m.low,
            f"high{number}": problem.m.high,
        }
    return asked


@lru_cache
def _query(dialect: Callable[[], Dialect], count: int) -> tuple[str, tuple[str, ...] | None]:
    """Return the query for that many questions, which gives the rows of each with its number.

    It is text in the form of the driver, as what SQLAlchemy does around such a query takes longer
    than the query. Its parameters are named, or come in the order of the names.
    """
    compiled = _statement(count).compile(dialect=dialect())
    names = compiled.positiontup
    return str(compiled), None if names is None else tuple(names)


def _statement(count: int) -> Any:  # noqa: ANN401 - its type says nothing more
    columns = [column(name, kind) for name, kind in _ASKED.items()]
    questions = [
        (
            literal_column(str(number), Integer()),
            *(bindparam(f"{name}{number}", type_=kind) for name, kind in _ASKED.items()),
        )
        for number in range(count)
    ]
    asked_each = (
        values(column("number", Integer()), *columns, name="asked").data(questions).cte("asked")
    )
    asked = asked_each.c
    row = verdicts.c
    same_context = and_(row.threads == asked.threads, row.regime == asked.regime)
    same_problem = and_(row.problem_id == asked.problem, same_context, row.model_key == asked.model)
    range_around = and_(
        row.range_of == asked.layer,
        row.cpu_key == asked.cpu,
        same_context,
        row.m_low <= asked.low,
        row.m_high >= asked.high,
    )
    hint = row.hint_of == asked.problem
    own, of_class = artifacts.alias("own"), artifacts.alias("of_class")
    return select(
        asked.number,
        verdicts,
        own.c.document.label("own_document"),
        own.c.attested_by.label("own_attested_by"),
        own.c.attestation.label("own_attestation"),
        _is_lifted(row.artifact).label("own_is_lifted"),
        _is_lifted(row.class_artifact).label("of_class_is_lifted"),
        of_class.c.document.label("of_class_document"),
        of_class.c.attested_by.label("of_class_attested_by"),
        of_class.c.attestation.label("of_class_attestation"),
    ).select_from(
        asked_each.join(verdicts, or_(same_problem, range_around, hint))
        .outerjoin(own, own.c.sha256 == row.artifact)
        .outerjoin(of_class, of_class.c.sha256 == row.class_artifact)
    )


def _sort(rows: Sequence[Row[Any]], problem: Problem, cpu: Cpu, context: ExecutionContext) -> Known:
    """Return what rows say, each taken for what its attested columns say that it is."""
    key, threads, regime = problem_id(problem), context.threads, context.regime
    own_key, of_class, of_model = cpu.exact_key, f"{cpu.class_key}-", f"{cpu.model_key}-"
    here: KnownVerdict | None = None
    siblings: list[KnownVerdict] = []
    ranges: list[KnownVerdict] = []
    has_trials = has_same_model = has_predictions = False
    imported = serial = 0
    for row in rows:
        serial = max(serial, row.serial)
        is_problem, cpu_key = row.problem_id == key, row.cpu_key
        if is_problem:
            has_trials = True
            imported += row.imported
            has_predictions |= bool(row.is_predicted) and row.threads == threads
        if row.threads != threads or row.regime != regime:
            continue
        if not is_problem:
            around = _range_around(row, problem)
            if around is not None and cpu_key == own_key:
                ranges.append(_verdict(row, around, context))
        elif cpu_key == own_key:
            here = _verdict(row, problem.m, context)
        elif cpu_key.startswith(of_class):
            siblings.append(_verdict(row, problem.m, context))
        elif cpu_key.startswith(of_model):
            has_same_model = True
    return Known(
        here=here,
        siblings=tuple(sorted(siblings, key=lambda one: -one.newest)),
        ranges=tuple(sorted(ranges, key=lambda one: (one.m.high - one.m.low, one.m.low))),
        has_trials=has_trials,
        has_same_model=has_same_model,
        has_predictions=has_predictions,
        imported=imported,
        serial=serial,
    )


def _range_around(row: Row[Any], problem: Problem) -> Rows | None:
    """Return the range of m of a row, None if its problem is no such range around `problem`."""
    try:
        rows = Rows(low=row.m_low, high=row.m_high)
        is_it = problem_id(replace(problem, m=rows)) == row.problem_id
    except InvalidProblem:  # someone changed the columns
        return None
    return rows if is_it and problem.m.low in rows and problem.m.high in rows else None


def _verdict(row: Row[Any], m: Rows, context: ExecutionContext) -> KnownVerdict:
    return KnownVerdict(m=m, cpu_key=row.cpu_key, context=context, newest=row.newest, row=row)
