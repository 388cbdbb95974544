"""Finding stored verdicts: one query for all that may answer a question."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from sqlalchemy import (
    Row,
    func,
    select,
    update,
)

from gemm_tuner.derive import SweepKey
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import InvalidProblem
from gemm_tuner.store.integrity import attestation_of
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.reading import usable_keys, who_attests
from gemm_tuner.store.sql.statements import Statements, read_quorum, translated_errors
from gemm_tuner.store.sql.tables import verdict_state, verdicts
from gemm_tuner.store.verdicts.asking import Asking, Found, ReadyAnswer, add_rows
from gemm_tuner.store.verdicts.deriving import (
    CLASS,
    NO_VERDICT,
    Deriving,
    exhausted_sweeps,
    statement,
)
from gemm_tuner.store.wire.verdict import load_verdict
from gemm_tuner.trust.attestation import Attestation, Statement
from gemm_tuner.trust.key_id import key_id_of


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
        found = Found.nothing(problem, cpu, context)
        self._find([found])
        return self.known_of(found)

    def known_of(self, found: Found) -> Known:
        """Return all that is stored for a question, whose rows are found.

        Raises:
            RowsDamaged: a row holds what nothing of this package stores.
        """
        with translated_errors():
            return _sort(found)

    def ready_each(self, questions: Iterable[Asking]) -> list[ReadyAnswer | Found]:
        """Return the answer to each question that is ready, and the rows of each other question.

        There is one query for `MAX_TOGETHER` questions, and another one for those whose answer was
        changed.

        Raises:
            RowsDamaged: a row holds text that is none; it spoils the query.
            StoreFailed: the own key cannot be read.
        """
        found = [Found.nothing(*question) for question in questions]
        with usable_keys():
            is_ready = self.quorum() == 1  # else stored verdicts are looked at
            self._find(found, (is_ready and self._keys.sealing_key()) or "")
            sealed = [one.answer for one in found if one.answer]
            contents = iter(self._keys.unsealed((one.about, one.sealed) for one in sealed))
        answers: list[ReadyAnswer | Found] = []
        for one in found:
            content = next(contents) if one.answer else None
            ready = one.answer and content and ReadyAnswer(content, one.answer.serial)
            answers.append(ready or one)
        self._find([one for one in answers if isinstance(one, Found) and one.answer])
        return answers

    def _find(self, asked: Sequence[Found], sealing_key: str = "") -> None:
        """Add what answers questions to them, as `add_rows` does."""
        if not asked:
            return
        with self._asking_once() as connection:
            add_rows(connection, asked, sealing_key)

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
        more, or where the kernel that it names is lost, revoked or not attested; with a quorum,
        also where another attests it, and where it was derived for another quorum.
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
        attested, by = statement(*stored.question, stored.text), stored.attestation
        quorum = self.quorum()
        with usable_keys():
            believed = self._keys.believed()
            why_not = self._keys.why_not_believed(Statement.VERDICT, attested, by)
            # Another host alone could have written what several are to find.
            is_own = quorum == 1 or (by and by.public_key == self._keys.sealing_key())
        if why_not or not is_own or stored.text == NO_VERDICT:
            return None
        verdict, rests_on = load_verdict(
            stored.text, problem=problem, cpu_key=cpu_key, context=context, basis=basis
        )
        if not rests_on <= believed or verdict.quorum != quorum:
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

    def quorum(self) -> int:
        """Return how many hosts must have found the same before a kernel is named."""
        if self._quorum is not None:
            return self._quorum
        with self._asking_once() as connection:
            return read_quorum(connection)

    def require_quorum(
        self, quorum: int, tell: Callable[[int, int], None] = lambda _done, _total: None
    ) -> int:
        """Let verdicts need so many hosts, and return how many they needed before.

        Where that changes, all are derived again, as `derive_again` does.

        Raises:
            InvalidSetting: the measuring keys cannot be used.
        """
        with self._reading() as connection:
            before = read_quorum(connection)
        if before != quorum:
            with self._writing() as connection:
                connection.execute(update(verdict_state).values(quorum=quorum))
                Deriving(connection, self._keys).derive_all(tell)
        return before

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


def _sort(found: Found) -> Known:
    """Return what rows say, each taken for what its attested columns say that it is."""
    problem, cpu, context = found.problem, found.cpu, found.context
    key, threads, regime = found.problem_key, context.threads, context.regime
    own_key, of_class, of_model = found.cpu_key, f"{cpu.class_key}-", f"{cpu.model_key}-"
    here: KnownVerdict | None = None
    siblings: list[KnownVerdict] = []
    ranges: list[KnownVerdict] = []
    has_trials = has_same_model = has_predictions = False
    imported = serial = 0
    for row in found.rows:
        serial = max(serial, index(row.serial))
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
