"""Reading and appending trials, and the CPUs that ran them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import Connection, RowMapping, select, update

from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import AttestedTrial, Outcome, Stage, Trial
from gemm_tuner.errors import InvalidRecord
from gemm_tuner.store.integrity import check_document, digest_of
from gemm_tuner.store.problems import insert_problem, problem_id
from gemm_tuner.store.reading import (
    columns_of,
    read_trial,
    select_trials,
    why_in_another_order,
    why_not_attested,
    why_not_believed,
)
from gemm_tuner.store.revocations import append_revocation, revoked_among
from gemm_tuner.store.sql.statements import Statements, insert_new
from gemm_tuner.store.sql.tables import Origin, artifacts, cpus, trials
from gemm_tuner.store.verdicts.deriving import Deriving
from gemm_tuner.store.wire.record import WireCpu, dump_record
from gemm_tuner.trust.attestation import Attestation, Statement

ASKED_AT_ONCE = 500  # of what one query names
IMPORTED_AT_ONCE = 100
# Such a kernel must not run anywhere. What hung may only have had too little time.
_REVOKING = frozenset({Outcome.WRONG, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some trials in the order of insertion, and where the next page begins, if there is one."""

    trials: tuple[Trial, ...]
    next_after: int | None


class Trials(Statements):
    """The trials of one database."""

    def add_trial(self, trial: Trial) -> None:
        """Append `trial`, as `add_trials` does."""
        self.add_trials([trial])

    def add_trials(self, trials: Sequence[Trial]) -> None:
        """Append `trials`, attested; when this returns, all are on the disk, and before, none is.

        One already there stays. A failure of a kernel that could have been served revokes it.

        Raises:
            InvalidSetting: the measuring key cannot be used.
            InvalidRecord: the problem has a fixed order of additions, and the kernel another.
        """
        attested = [(trial, self._attest(trial)) for trial in trials]
        with self._writing() as connection:
            for trial, attestation in attested:
                if _append(connection, trial, Origin.MEASURED, attestation):
                    _revoke_if_failed(connection, trial)
                    Deriving(connection, self._keys).follow_trial(trial)

    def _attest(self, trial: Trial) -> Attestation:
        """Return the statement that a trial was measured here, if it is one to be kept."""
        why_not = why_in_another_order(trial)
        if why_not:
            raise InvalidRecord(f"a trial of {trial.candidate.text} is not kept: {why_not}.")
        return self._keys.attest(Statement.TRIAL, dump_record(trial))

    def add_imported(self, imported: Iterable[Trial]) -> int:
        """Append trials from elsewhere and return how many were not known.

        They are committed some at a time, so that others can write in between; what was committed
        before a failure stays, and is known when the same trials come again.
        """
        added = 0
        waiting = iter(imported)
        while chunk := tuple(islice(waiting, IMPORTED_AT_ONCE)):
            with self._writing() as connection:
                new = [one for one in chunk if _append(connection, one, Origin.IMPORTED)]
                Deriving(connection, self._keys).follow_imports(new)
                added += len(new)
        return added

    def trials(
        self,
        *,
        problem: Problem | None = None,
        cpu_key: str | None = None,
        class_key: str | None = None,
        model_key: str | None = None,
        generator: str | None = None,
        only_decisive: bool = False,
        origin: Origin | None = Origin.MEASURED,
    ) -> tuple[Trial, ...]:
        """Return the trials that match every given value, in the order of insertion.

        Only trials that were run into this store are returned unless `origin` says otherwise;
        None stands for any. Of those run here, only failures need not be attested by a key that is
        believed: what speaks against a kernel counts, whoever wrote it. With `only_decisive`, those
        are left out that no verdict depends on: what neither confirmed a kernel nor failed.
        """
        found = self.attested_trials(
            problem=problem,
            cpu_key=cpu_key,
            class_key=class_key,
            model_key=model_key,
            generator=generator,
            only_decisive=only_decisive,
            origin=origin,
        )
        return tuple(one.trial for one in found)

    def attested_trials(
        self,
        *,
        problem: Problem | None = None,
        cpu_key: str | None = None,
        class_key: str | None = None,
        model_key: str | None = None,
        generator: str | None = None,
        only_decisive: bool = False,
        origin: Origin | None = Origin.MEASURED,
    ) -> tuple[AttestedTrial, ...]:
        """Return what `trials` does, each with the key of who attests it."""
        query = select_trials()
        if problem is not None:
            query = query.where(trials.c.problem_id == problem_id(problem))
        if cpu_key is not None:
            query = query.where(cpus.c.exact_key == cpu_key)
        if class_key is not None:
            query = query.where(cpus.c.class_key == class_key)
        if model_key is not None:
            query = query.where(cpus.c.class_key.startswith(f"{model_key}-", autoescape=True))
        if generator is not None:
            query = query.where(trials.c.generator == generator)
        if only_decisive:
            query = query.where(
                (trials.c.stage == Stage.CONFIRM.value)
                | (trials.c.outcome != Outcome.CORRECT.value)
            )
        if origin is not None:
            query = query.where(trials.c.origin == origin.value)
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            AttestedTrial(trial, row["attested_by"])
            for trial, row in [(read_trial(row), row) for row in rows]
            if origin is not Origin.MEASURED or self._why_not_believed(trial, row) is None
        )

    def unbelieved_trials(self, problem: Problem) -> Mapping[str, int]:
        """Return why trials of a problem that were run here do not count, and how many each."""
        query = select_trials().where(
            trials.c.problem_id == problem_id(problem), trials.c.origin == Origin.MEASURED.value
        )
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
        # What is attested need not be read, which takes longest, if it may add in any order.
        doubted = (row for row in rows if problem.is_fixed or why_not_attested(self._keys, row))
        reasons = (self._why_not_believed(read_trial(row), row) for row in doubted)
        return Counter(filter(None, reasons))

    def attest_trials(self) -> int:
        """Attest with the own key what was run here and no believed key attests; return how many.

        Raises:
            InvalidSetting: the measuring keys cannot be used.
        """
        query = select_trials().where(trials.c.origin == Origin.MEASURED.value)
        with self._reading() as connection:
            rows = [
                row
                for row in connection.execute(query).mappings()
                if read_trial(row).outcome is Outcome.CORRECT and why_not_attested(self._keys, row)
            ]
        with self._writing() as connection:
            for row in rows:
                signed = self._keys.attest(Statement.TRIAL, row["document"])
                connection.execute(
                    update(trials)
                    .where(trials.c.sequence == row["sequence"])
                    .values(attested_by=signed.public_key, attestation=signed.signature)
                )
            if rows:
                Deriving(connection, self._keys).derive_all()
        return len(rows)

    def page(self, *, after: int = 0, limit: int = 100) -> Page:
        """Return at most `limit` trials that were run into this store, those behind `after`."""
        query = (
            select_trials()
            .where(trials.c.sequence > after, trials.c.origin == Origin.MEASURED.value)
            .limit(limit + 1)
        )
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
        return Page(
            trials=tuple(read_trial(row) for row in rows[:limit]),
            next_after=rows[limit - 1]["sequence"] if len(rows) > limit else None,
        )

    def cpu(self, exact_key: str) -> Cpu | None:
        """Return a CPU known by this key."""
        if "\0" in exact_key:
            return None  # PostgreSQL cannot even be asked
        query = select(cpus.c.id, cpus.c.document).where(cpus.c.exact_key == exact_key).limit(1)
        row = self._first(query)
        return None if row is None else _read_cpu(*row)

    def cpus(self, exact_keys: Iterable[str]) -> dict[str, Cpu]:
        """Return the CPUs known by some keys."""
        keys = [key for key in dict.fromkeys(exact_keys) if "\0" not in key]
        known: dict[str, Cpu] = {}
        with self._asking_once() as connection:
            for begin in range(0, len(keys), ASKED_AT_ONCE):
                query = select(cpus.c.exact_key, cpus.c.id, cpus.c.document).where(
                    cpus.c.exact_key.in_(keys[begin : begin + ASKED_AT_ONCE])
                )
                for key, *row in connection.execute(query):
                    if key not in known:
                        known[key] = _read_cpu(*row)
        return known

    def _why_not_believed(self, trial: Trial, row: RowMapping) -> str | None:
        """Return why a trial that was run here is no reason to serve a kernel."""
        return why_not_believed(self._keys, trial, row)


def _read_cpu(document_id: str, document: str) -> Cpu:
    check_document("CPU", document_id, document)
    return WireCpu.model_validate_json(document).to_domain()


def _append(
    connection: Connection, trial: Trial, origin: Origin, attestation: Attestation | None = None
) -> bool:
    """Append a trial with its problem and its CPU, and return whether it was new."""
    insert_problem(connection, trial.problem)
    cpu_document = canonical_json(WireCpu.of(trial.cpu).model_dump(mode="json"))
    cpu_id = digest_of(cpu_document)
    insert_new(
        connection,
        cpus,
        id=cpu_id,
        document=cpu_document,
        exact_key=trial.cpu.exact_key,
        class_key=trial.cpu.class_key,
    )
    document = dump_record(trial)
    return insert_new(
        connection,
        trials,
        id=digest_of(document),
        document=document,
        origin=origin.value,
        cpu_id=cpu_id,
        **columns_of(trial),
        attested_by=attestation.public_key if attestation else None,
        attestation=attestation.signature if attestation else None,
    )


def _revoke_if_failed(connection: Connection, trial: Trial) -> None:
    """Revoke the kernel of a trial that failed, if its binary is there to be served."""
    if trial.outcome not in _REVOKING or trial.artifact is None:
        return
    digest = trial.artifact.sha256
    is_kept = connection.scalar(select(artifacts.c.sha256).where(artifacts.c.sha256 == digest))
    if is_kept is None or revoked_among(connection, [digest]):
        return
    append_revocation(
        connection,
        digest,
        reason=f"recorded {trial.outcome.value} for {trial.problem.text}",
        actor="a trial",
        now=trial.created_at,
    )
