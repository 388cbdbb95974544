"""Removing what no answer needs any longer: old races and finals, and kernels that lost them.

Nothing is removed that decides a verdict: no failure, nothing confirmed or predicted, and no kernel
of these. The newest trial of each problem stays, so that serials do not go back.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from gemm_tuner.domain.access import AuditEntry
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.units import counted
from gemm_tuner.store.audit import append_audit
from gemm_tuner.store.integrity import check_document
from gemm_tuner.store.sql.scan import read_chunks
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import Origin, artifacts, sources, trials
from gemm_tuner.store.wire.record import parse_record

REMOVED_AT_ONCE = 100
# Between a kernel and its trial, which a sweep adds one after the other.
PAUSE_S = 1.0

# Says which kernels of a trial's problem, CPU model and context may be served all the same.
Nameable = Callable[[Trial], Collection[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPlan:
    """What may go: numbers of trials, and digests of kernels; `newest` is the last trial seen."""

    trials: tuple[int, ...]
    artifacts: tuple[str, ...]
    artifact_bytes: int
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningReport:
    """What went."""

    trials: int
    artifacts: int
    sources: int


class Pruning(Statements):
    """Finds and removes what no answer needs, beside services and sweeps that run."""

    def plan(self, *, before: datetime, nameable: Nameable) -> PruningPlan:
        """Return what was tried before a time and is needed no longer; nothing is changed.

        Raises:
            StoreFailed: the database does not answer, or a trial in it is damaged.
        """
        last_of_problem = select(func.max(trials.c.sequence)).group_by(trials.c.problem_id)
        with self._reading() as connection:
            last = set(connection.scalars(last_of_problem))
            kept: set[str] = set()
            losers: list[tuple[int, str | None]] = []
            for row in _trials_of(connection):
                facts = json.loads(row["document"])
                artifact = (facts.get("artifact") or {}).get("sha256")
                if _is_undecisive(row) and datetime.fromisoformat(facts["created_at"]) < before:
                    losers.append((row["sequence"], artifact))
                elif artifact:
                    kept.add(artifact)
            kept |= self._nameable(connection, losers, nameable)
            gone = [number for number, digest in losers if digest not in kept]
            length = func.length(artifacts.c.compressed_binary)
            found = connection.execute(select(artifacts.c.sha256, length))
            sizes = {row[0]: row[1] for row in found}
        unneeded = tuple(sorted(sizes.keys() - kept))
        return PruningPlan(
            trials=tuple(number for number in gone if number not in last),
            artifacts=unneeded,
            artifact_bytes=sum(sizes[digest] for digest in unneeded),
            newest=max(last, default=0),
        )

    def remove(
        self, plan: PruningPlan, *, actor: str, now: datetime, pause: Callable[[float], None]
    ) -> PruningReport:
        """Remove what a plan names, some at a time, and note it in the audit log.

        A kernel that a trial newer than the plan names stays. One that was removed between being
        added and being named is put back; `pause` waits for that, given seconds.
        """
        removed_trials = removed_artifacts = 0
        for chunk in _chunks(plan.trials):
            with self._writing() as connection:
                found = connection.execute(delete(trials).where(trials.c.sequence.in_(chunk)))
                removed_trials += found.rowcount
        for digests in _chunks(plan.artifacts):
            removed_artifacts += self._remove_artifacts(digests, plan.newest, pause)
        with self._writing() as connection:
            named = select(artifacts.c.source_sha256)
            unnamed = connection.execute(delete(sources).where(sources.c.sha256.not_in(named)))
            report = PruningReport(
                trials=removed_trials, artifacts=removed_artifacts, sources=unnamed.rowcount
            )
            told = (
                f"{counted(report.trials, 'trial')}, {counted(report.artifacts, 'kernel')}, "
                f"{counted(report.sources, 'source')}"
            )
            entry = AuditEntry(at=now, actor=actor, action="prune", subject="database", detail=told)
            append_audit(connection, entry)
        return report

    def _nameable(
        self, connection: Connection, losers: Sequence[tuple[int, str | None]], nameable: Nameable
    ) -> set[str]:
        """Return the kernels that may be served although they lost, once for each place."""
        kept: set[str] = set()
        seen: set[tuple[object, ...]] = set()
        for chunk in _chunks([number for number, _digest in losers]):
            query = select(trials.c.id, trials.c.document).where(trials.c.sequence.in_(chunk))
            for key, document in connection.execute(query):
                check_document("trial", key, document)
                trial = parse_record(document)
                place = (trial.problem, trial.cpu.model_key, trial.context)
                if place not in seen:
                    seen.add(place)
                    kept |= set(nameable(trial))
        return kept

    def _remove_artifacts(
        self, digests: Sequence[str], newest: int, pause: Callable[[float], None]
    ) -> int:
        with self._writing() as connection:
            gone = sorted(set(digests) - _named_since(connection, newest))
            query = select(artifacts).where(artifacts.c.sha256.in_(gone))
            rows = [dict(row) for row in connection.execute(query).mappings()]
            connection.execute(delete(artifacts).where(artifacts.c.sha256.in_(gone)))
        pause(PAUSE_S)
        with self._writing() as connection:
            named = _named_since(connection, newest)
            there = set(
                connection.scalars(select(artifacts.c.sha256).where(artifacts.c.sha256.in_(gone)))
            )
            again = [row for row in rows if row["sha256"] in named - there]
            if again:
                connection.execute(insert(artifacts), again)
        return len(rows) - len(again)


def _trials_of(connection: Connection) -> Iterator[Any]:
    columns = (
        trials.c.sequence,
        trials.c.document,
        trials.c.origin,
        trials.c.stage,
        trials.c.outcome,
    )
    for chunk in read_chunks(connection, trials, columns):
        yield from chunk


def _is_undecisive(row: Any) -> bool:  # noqa: ANN401 - a row of _trials_of
    return (
        row["origin"] == Origin.MEASURED.value
        and row["outcome"] == Outcome.CORRECT.value
        and row["stage"] in {Stage.RACE.value, Stage.FINAL.value}
    )


def _named_since(connection: Connection, newest: int) -> set[str]:
    """Return the kernels that trials behind a number name."""
    query = select(trials.c.document).where(trials.c.sequence > newest)
    facts = [json.loads(document) for document in connection.scalars(query)]
    return {one["artifact"]["sha256"] for one in facts if one.get("artifact")}


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), REMOVED_AT_ONCE):
        yield items[start : start + REMOVED_AT_ONCE]
