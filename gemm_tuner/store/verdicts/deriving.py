"""Verdicts follow trials: each change of what they rest on derives those that it concerns again.

It happens in the transaction of the change, so a reader sees both or neither.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, case, delete, func, select, update

from gemm_tuner.derive import (
    RULES,
    Asked,
    SweepKey,
    derive_for_hosts,
    runnable_trials,
    split_by_cpu,
)
from gemm_tuner.domain.canonical import canonical_json, identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import AttestedTrial, Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.store.integrity import attestation_of, content_of
from gemm_tuner.store.problems import problem_id, read_problem
from gemm_tuner.store.reading import read_trial, select_trials, who_attests, why_not_believed
from gemm_tuner.store.sql.statements import note_change, read_quorum, upsert
from gemm_tuner.store.sql.tables import (
    Origin,
    artifacts,
    cpus,
    problems,
    sweep_ends,
    trials,
    verdict_state,
    verdicts,
)
from gemm_tuner.store.verdicts.figures import figure_columns, shape_columns
from gemm_tuner.store.verdicts.ready import HeldArtifact, sealed_answer
from gemm_tuner.store.wire.verdict import dump_verdict
from gemm_tuner.trust.attestation import MeasuringKeys, Statement

_KEY = ("problem_id", "threads", "regime", "model_key", "cpu_key")
CLASS = "class_"  # how the columns begin of what holds for other CPUs of the class
NO_VERDICT = "null"  # the document where no kernel is trusted
_PROBLEMS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class _Place:
    """Where trials of a problem were run: what a verdict is for."""

    cpu_key: str
    class_key: str
    context: ExecutionContext

    @property
    def model_key(self) -> str:
        return self.class_key.rsplit("-", 2)[0]  # before the class and the digest of features


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What verdicts of a problem follow from: the trials of a class, ended sweeps, the quorum."""

    trials: Sequence[AttestedTrial]
    exhausted: Collection[SweepKey]
    quorum: int

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys that attest it; a failure counts whoever noted it."""
        return frozenset(
            one.key for one in self.trials if one.key and one.trial.outcome is Outcome.CORRECT
        )


def is_decisive(trial: Trial) -> bool:
    """Return whether a verdict may depend on a trial: it confirmed a kernel, or failed."""
    return trial.stage is Stage.CONFIRM or trial.outcome is not Outcome.CORRECT


def layer_id(problem: Problem) -> str:
    """Return a key that problems share which differ in m alone."""
    n = problem.n if problem.least_n is None else problem.columns.text
    words = (n, problem.k, problem.types.text, problem.layout_text, problem.epilogue.text)
    fixed = (problem.reduction.value,) if problem.is_fixed else ()
    return _identity_of((*words, *fixed, *problem.operation.words))


# A model asks for one layer with many m.
_identity_of = lru_cache(maxsize=1024)(identity)


def statement(
    kind: str, problem_key: str, cpu_key: str, context: ExecutionContext, document: str
) -> str:
    """Return what is attested of a verdict: its document, with the question that it answers."""
    question = (kind, problem_key, cpu_key, context.threads, context.regime.value)
    return canonical_json([*question, document])


class Deriving:
    """Derives verdicts in a transaction that changes what they rest on, and attests them."""

    def __init__(self, connection: Connection, keys: MeasuringKeys) -> None:
        self._connection = connection
        self._keys = keys

    def _lock(self, key: str) -> None:
        """Let transactions that change verdicts of a problem follow each other.

        SQLite has one writer at a time; elsewhere, one must see the trials of the other.
        """
        self._connection.execute(
            select(problems.c.id).where(problems.c.id == key).with_for_update()
        )

    def follow_trial(self, trial: Trial) -> None:
        """Bring verdicts up to date with a trial that was run into this store."""
        place = _place_of(trial)
        if is_decisive(trial):
            self.derive_class(trial.problem, place.class_key)
            return
        is_predicted = trial.stage is Stage.PREDICTED
        values: dict[str, Any] = _row(trial.problem, place)
        hints = {"is_predicted": True, "hint_of": values["problem_id"]} if is_predicted else {}
        if upsert(self._connection, verdicts, {**values, **hints}, hints):
            note_change(self._connection)
        # Without a verdict, an answer tells of trials: a later one has the greater serial.
        self._connection.execute(
            update(verdicts)
            .where(*(verdicts.c[name] == values[name] for name in _KEY))
            .where(verdicts.c.document.is_(None))
            .values(serial=select(func.max(trials.c.sequence)).scalar_subquery())
        )

    def follow_imports(self, imported: Iterable[Trial]) -> None:
        """Count trials from elsewhere, which decide nothing."""
        counts = Counter((trial.problem, _place_of(trial)) for trial in imported)
        for (problem, place), count in counts.items():
            values = _row(problem, place)
            hint = {"hint_of": values["problem_id"]}
            upsert(
                self._connection,
                verdicts,
                {**values, **hint, "imported": count},
                {**hint, "imported": verdicts.c.imported + count},
            )
        if counts:
            note_change(self._connection)

    def follow_build(self, sha256: str) -> None:
        """Derive verdicts again that could name a binary if it were here, now that it is."""
        found = select(verdicts.c.problem_id, verdicts.c.class_key).where(
            verdicts.c.lacking > "", verdicts.c.lacking.contains(sha256)
        )
        for key, class_key in self._connection.execute(found.distinct()).all():
            self.derive_class(self._problem(key), class_key)

    def follow_sweep_end(self, problem: Problem, cpu_key: str) -> None:
        """Derive verdicts again that a sweep which ended may have made complete."""
        classes = select(cpus.c.class_key).where(cpus.c.exact_key == cpu_key).distinct()
        for class_key in self._connection.scalars(classes).all():
            self.derive_class(problem, class_key)

    def derive_class(self, problem: Problem, class_key: str) -> None:
        """Derive the verdicts of a problem on the CPUs of a class."""
        self._lock(problem_id(problem))
        self._derive(problem, class_key)
        note_change(self._connection)

    def derive_all(self, tell: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """Derive all verdicts again; `tell` hears how many problems are done, of how many."""
        total, done = self._connection.scalar(select(func.count()).select_from(problems)) or 0, 0
        numbers = (select(func.max(trials.c.sequence)), select(func.max(verdicts.c.serial)))
        serial = max(self._connection.scalar(query) or 0 for query in numbers)
        self._connection.execute(delete(verdicts))
        after = ""
        while keys := self._connection.scalars(
            select(problems.c.id)
            .where(problems.c.id > after)
            .order_by(problems.c.id)
            .limit(_PROBLEMS_AT_ONCE)
        ).all():
            for key in keys:
                self._derive_problem(self._problem(key), serial)
            after, done = keys[-1], done + len(keys)
            tell(done, total)
        self._connection.execute(update(verdict_state).values(rules=RULES))
        note_change(self._connection)

    def _derive_problem(self, problem: Problem, serial: int) -> None:
        """Derive the verdicts of a problem on all CPUs, with what was imported and predicted."""
        tried = (
            select(cpus.c.exact_key, cpus.c.class_key, trials.c.threads, trials.c.regime)
            .add_columns(trials.c.origin, trials.c.stage, trials.c.outcome, func.count())
            .join(cpus, cpus.c.id == trials.c.cpu_id)
            .where(trials.c.problem_id == problem_id(problem))
            .group_by(cpus.c.exact_key, cpus.c.class_key, trials.c.threads, trials.c.regime)
            .group_by(trials.c.origin, trials.c.stage, trials.c.outcome)
        )
        found = self._connection.execute(tried).all()
        rows: dict[_Place, dict[str, Any]] = {}
        for cpu_key, class_key, threads, regime, origin, stage, outcome, count in found:
            place = _Place(cpu_key, class_key, _context(threads, regime))
            row = rows.setdefault(place, {**_row(problem, place), "serial": serial})
            if origin == Origin.IMPORTED:
                row["imported"] += count
            elif stage == Stage.PREDICTED and outcome == Outcome.CORRECT:
                row["is_predicted"] = True
            if row["imported"] or row["is_predicted"]:
                row["hint_of"] = row["problem_id"]
        for row in rows.values():
            upsert(self._connection, verdicts, row, {})
        for class_key in dict.fromkeys(place.class_key for place in rows):
            self._derive(problem, class_key, serial)

    def _derive(self, problem: Problem, class_key: str, serial: int = 0) -> None:
        """Derive the verdicts of a problem on the CPUs of a class, from trials that may decide."""
        query = select_trials().where(
            trials.c.problem_id == problem_id(problem),
            cpus.c.class_key == class_key,
            trials.c.origin == Origin.MEASURED.value,
            (trials.c.stage == Stage.CONFIRM.value) | (trials.c.outcome != Outcome.CORRECT.value),
        )
        newest: dict[str, int] = {}
        places: dict[_Place, frozenset[IsaFeature]] = {}
        decisive: list[AttestedTrial] = []
        for row in self._connection.execute(query).mappings():
            trial = read_trial(row)
            newest[trial.cpu.exact_key] = row["sequence"]
            serial = max(serial, row["sequence"])
            places[_place_of(trial)] = trial.cpu.isa
            if why_not_believed(self._keys, trial, row) is None:
                decisive.append(AttestedTrial(trial, row["attested_by"]))
        exhausted = exhausted_sweeps(self._connection, problem)
        evidence = _Evidence(decisive, exhausted, read_quorum(self._connection))
        for place, isa in places.items():
            values = self._verdicts_of(problem, place, isa, evidence)
            new = {**values, "newest": newest[place.cpu_key], "serial": serial}
            # A client that kept an answer takes one with a smaller serial for an old one.
            kept = case((verdicts.c.serial > serial, verdicts.c.serial), else_=serial)
            changed = {**new, "serial": kept}
            upsert(self._connection, verdicts, {**_row(problem, place), **new}, changed)

    def _verdicts_of(
        self,
        problem: Problem,
        place: _Place,
        isa: frozenset[IsaFeature],
        evidence: _Evidence,
    ) -> dict[str, Any]:
        """Return the columns of the verdicts that trials allow: for the CPU, and for its class.

        A kernel that failed on one CPU of the class is not trusted on another.
        """

        def text_of(verdict: Verdict | None) -> str | None:
            return dump_verdict(verdict, rests_on=evidence.keys) if verdict else None

        here, elsewhere = split_by_cpu(evidence.trials, place.cpu_key)
        own, lacking = self._verdict_of(problem, place, isa, (here, elsewhere), evidence)
        columns: dict[str, Any] = {
            "artifact": own.artifact.sha256 if own and own.artifact else None,
            **self._attested("", problem, place, text_of(own)),
            **figure_columns(own, [one.trial for one in here]),
            "class_artifact": None,
            **self._attested(CLASS, problem, place, None),
            "lacking": " ".join(sorted(lacking)) or None,
        }
        columns["answer"] = self._answer(own, evidence.keys, columns["attestation"])
        for_class = split_by_cpu(evidence.trials, place.cpu_key, of_class=True)
        if for_class[0] != here:
            other, _lacking = self._verdict_of(problem, place, isa, for_class, evidence)
            document = text_of(other) or NO_VERDICT
            if document != columns["document"]:
                columns |= self._attested(CLASS, problem, place, document)
                columns["class_artifact"] = (
                    other.artifact.sha256 if other and other.artifact else None
                )
        return columns

    def _verdict_of(
        self,
        problem: Problem,
        place: _Place,
        isa: frozenset[IsaFeature],
        decisive: tuple[Sequence[AttestedTrial], Sequence[AttestedTrial]],
        evidence: _Evidence,
    ) -> tuple[Verdict | None, frozenset[str]]:
        """Return the verdict that trials allow, and the binaries that are missing for others."""
        own, others = decisive
        runnable = runnable_trials([one.trial for one in own], place.context, isa)
        digests = frozenset(trial.artifact.sha256 for trial in runnable if trial.artifact)
        held = self._held(digests)
        asked = Asked(
            problem=problem,
            cpu_key=place.cpu_key,
            context=place.context,
            isa=isa,
            basis=Basis.MEASURED,
            held=held,
            exhausted=evidence.exhausted,
        )
        verdict, _confirmed = derive_for_hosts(own, others, asked, quorum=evidence.quorum)
        return verdict, digests - held.keys()

    def _answer(
        self, verdict: Verdict | None, rests_on: Collection[str], attestation: str | bytes | None
    ) -> bytes | None:
        """Return the answer that an attested verdict gives, ready to be signed, if it can be."""
        if verdict is None or not isinstance(attestation, bytes):
            return None
        digest = verdict.artifact.sha256 if verdict.artifact else ""
        held = self._held({digest}).get(digest)
        return sealed_answer(
            self._keys, verdict, attestation=attestation, rests_on=rests_on, held=held
        )

    def _held(self, digests: Collection[str]) -> dict[str, HeldArtifact]:
        """Return those of `digests` whose binaries may be served, each with who attests it."""
        if not digests:
            return {}
        row = artifacts.c
        query = select(row.sha256, row.document, row.attested_by, row.attestation)
        found: dict[str, HeldArtifact] = {}
        for digest, document, by, signature in self._connection.execute(
            query.where(row.sha256.in_(digests))
        ):
            key, _why = who_attests(self._keys, digest, document, attestation_of(by, signature))
            if key:
                found[digest] = HeldArtifact(
                    sha256=digest, document=document, attested_by=key, attestation=signature
                )
        return found

    def _attested(
        self, kind: str, problem: Problem, place: _Place, document: str | None
    ) -> dict[str, str | bytes | None]:
        """Return the columns of a document of a kind, with its attestation."""
        columns = (f"{kind}document", f"{kind}attested_by", f"{kind}attestation")
        if document is None:
            return dict.fromkeys(columns)
        text = statement(kind, problem_id(problem), place.cpu_key, place.context, document)
        signed = self._keys.attest(Statement.VERDICT, text)
        return dict(zip(columns, (document, signed.public_key, content_of(signed)), strict=True))

    def _problem(self, key: str) -> Problem:
        row = self._connection.execute(
            select(problems.c.id, problems.c.document).where(problems.c.id == key)
        ).one()
        return read_problem(row[0], row[1])


def exhausted_sweeps(connection: Connection, problem: Problem) -> frozenset[SweepKey]:
    """Return the sweeps of a problem, in all formats, that came to the end of their search."""
    ends = sweep_ends.c
    query = select(
        ends.cpu_key, ends.threads, ends.regime, ends.toolchain, ends.generator, ends.baseline
    ).where(ends.problem_id == problem_id(problem), ends.packed_format == "", ends.is_exhausted)
    return frozenset(
        (cpu_key, _context(threads, regime), toolchain, generator, baseline)
        for cpu_key, threads, regime, toolchain, generator, baseline in connection.execute(query)
    )


def _row(problem: Problem, place: _Place) -> dict[str, Any]:
    """Return a row that knows no verdict."""
    layer = layer_id(problem)
    return {
        "problem_id": problem_id(problem),
        "threads": place.context.threads,
        "regime": place.context.regime.value,
        "model_key": place.model_key,
        "cpu_key": place.cpu_key,
        "class_key": place.class_key,
        "m_low": problem.m.low,
        "m_high": problem.m.high,
        "range_of": layer if problem.m.exact is None else None,
        "hint_of": None,
        "imported": 0,
        "is_predicted": False,
        "newest": 0,
        "serial": 0,
        **shape_columns(problem, layer),
    }


def _place_of(trial: Trial) -> _Place:
    return _Place(trial.cpu.exact_key, trial.cpu.class_key, trial.context)


def _context(threads: int, regime: str) -> ExecutionContext:
    return ExecutionContext(threads=threads, regime=Regime(regime))
