"""A database to load the pages of the service with: many trials, verdicts, jobs and misses."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import count, islice
from typing import Any

from service_databases import (
    KERNELS,
    ROWS_AT_ONCE,
    SOURCE,
    binary_of,
    placeholder,
    problem_row,
    verdict_row,
)
from sqlalchemy import Connection, Engine, Table, insert, select, update

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.store.exchange import shipped_records
from gemm_tuner.store.integrity import digest_of
from gemm_tuner.store.jobs.rows import time_text
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database, writing
from gemm_tuner.store.sql.tables import (
    Origin,
    artifacts,
    cpus,
    jobs,
    misses,
    problems,
    trials,
    verdict_state,
    verdicts,
)
from gemm_tuner.store.verdicts.ready import HeldArtifact
from gemm_tuner.store.wire.record import WireCpu, dump_record
from gemm_tuner.trust.attestation import MeasuringKeys, Statement

CPUS = 20
MOST_OF_ONE = 100_000  # trials of one problem, at most a tenth of all
JOBS = 100_000
ROWS_APART = 4096  # more than the m of any record, so that no two copies are of one problem
MISSES = 9_000
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)

_Row = dict[str, Any]


def fill_pages(url: str, wanted: int) -> float:
    """Make a database with `wanted` trials, and return how many seconds that took."""
    begin_s = time.monotonic()
    engine = open_database(url)
    held = _add_builds(engine)
    groups = _groups(held)
    with writing(engine).begin() as connection:
        done = _add_copies(connection, groups, held, wanted - min(MOST_OF_ONE, wanted // 10))
        _add_repeats(connection, groups[0], wanted - done)
        _add_jobs(connection, [group[0].problem for group in groups])
        connection.execute(update(verdict_state).values(changes=verdict_state.c.changes + 1))
    if engine.dialect.name == "postgresql":  # as its own process does after a while
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    engine.dispose()
    return time.monotonic() - begin_s


def _add_builds(engine: Engine) -> dict[str, HeldArtifact]:
    repository = Repository(engine)
    first = next(trial.artifact for trial in shipped_records() if trial.artifact)
    for number in range(KERNELS):
        repository.add_build(
            placeholder(first, number), binary=binary_of(number), source_text=SOURCE
        )
    row = artifacts.c
    query = select(row.sha256, row.document, row.attested_by, row.attestation)
    with engine.connect() as connection:
        return {
            each["sha256"]: HeldArtifact(**each) for each in connection.execute(query).mappings()
        }


def _groups(held: Mapping[str, HeldArtifact]) -> list[list[Trial]]:
    """Return the shipped records of each problem, CPU and context, with placeholders as kernels."""
    digests = sorted(held)
    numbers = count()
    found: dict[tuple[Problem, str, ExecutionContext, str], list[Trial]] = {}
    for trial in shipped_records():
        key = (trial.problem, trial.cpu.exact_key, trial.context, trial.generator)
        if trial.problem.m.exact is None:
            continue
        artifact: Artifact | None = trial.artifact
        if artifact is not None:
            artifact = placeholder(artifact, next(numbers) % len(digests))
        found.setdefault(key, []).append(replace(trial, artifact=artifact))
    # One generator for each problem, CPU and context: that with the most records.
    best: dict[tuple[Problem, str, ExecutionContext], list[Trial]] = {}
    for (problem, cpu_key, context, _generator), group in found.items():
        place = (problem, cpu_key, context)
        best[place] = max(best.get(place, []), group, key=len)
    return list(best.values())


def _add_copies(
    connection: Connection,
    groups: Sequence[Sequence[Trial]],
    held: Mapping[str, HeldArtifact],
    wanted: int,
) -> int:
    """Add copies of all groups, each for another m and CPU, until there are enough trials."""
    keys, known = MeasuringKeys(), set[str]()
    decided = [_decide(group) for group in groups]
    dumped = [[json.loads(dump_record(trial)) for trial in group] for group in groups]
    done, begin_s = 0, time.monotonic()
    waiting: list[_Row] = []
    rows_of_verdicts: list[_Row] = []
    for turn in count():
        for group, verdict, documents in zip(groups, decided, dumped, strict=True):
            if done >= wanted:
                break
            cpu = replace(group[0].cpu, model=1 + turn % CPUS)
            m = group[0].problem.m.low + ROWS_APART * (turn // CPUS)
            problem = replace(group[0].problem, m=Rows(low=m, high=m))
            cpu_key = _add_cpu(connection, cpu, known)
            key = problem_id(problem)
            if key not in known:
                known.add(key)
                connection.execute(insert(problems), [problem_row(problem)])
            for trial, document in zip(group, documents, strict=True):
                document["problem"], document["cpu"]["model"] = problem.text, cpu.model
                waiting.append(_trial_row(keys, trial, canonical_json(document), key, cpu_key))
            done += len(group)
            if verdict is not None:
                here = replace(verdict, problem=problem)
                row, _problem = verdict_row(keys, here, cpu, held, group)
                rows_of_verdicts.append(row)
            if len(waiting) >= ROWS_AT_ONCE:
                _flush(connection, trials, waiting)
                _flush(connection, verdicts, rows_of_verdicts)
        _tell(done, wanted, begin_s)
        if done >= wanted:
            break
    _flush(connection, trials, waiting)
    _flush(connection, verdicts, rows_of_verdicts)
    return done


def _add_repeats(connection: Connection, group: Sequence[Trial], wanted: int) -> None:
    """Add trials of one problem, each of another second."""
    trial = group[0]
    key = problem_id(trial.problem)
    keys = MeasuringKeys()
    cpu = replace(trial.cpu, model=1)
    cpu_key = _add_cpu(connection, cpu, set())
    document = json.loads(dump_record(replace(trial, cpu=cpu)))

    def rows() -> Iterator[_Row]:
        for number in range(wanted):
            at = trial.created_at + timedelta(seconds=number + 1)
            document["created_at"] = at.isoformat().replace("+00:00", "Z")
            yield _trial_row(keys, trial, canonical_json(document), key, cpu_key)

    each = rows()
    while some := list(islice(each, ROWS_AT_ONCE)):
        connection.execute(insert(trials), some)


def _add_jobs(connection: Connection, known: Sequence[Problem]) -> None:
    """Add jobs of all states and misses."""
    states = (*(JobState.DONE,) * 6, JobState.FAILED, JobState.CANCELLED)
    rows = []
    for number in range(JOBS):
        problem = known[number % len(known)]
        at = time_text(BEGIN + timedelta(seconds=number))
        is_live = number >= JOBS - 40
        state = (JobState.RUNNING, JobState.WAITING)[number % 2] if is_live else states[number % 8]
        rows.append(
            {
                "id": sha256(b"job %d" % number).hexdigest()[:32],
                "problem_id": problem_id(problem),
                "problem": problem.text,
                "class_key": "AuthenticAMD-1a-2-avx512-c5ccbe36",
                "threads": 1,
                "regime": "hot",
                "budget_s": 30.0,
                "priority": 0,
                "state": state.value,
                "owner": f"owner {number % 7}",
                "created_at": at,
                "changed_at": at,
                "attempts": 1,
                "tried": 40,
                "failed": 2,
                "best_ns": 1234.5,
                "over_baseline": 1.1,
                "seconds_left": 12.0,
                "revision": 9,
                "is_cancel_asked": False,
                "detail": "",
            }
        )
    for begin in range(0, JOBS, ROWS_AT_ONCE):
        connection.execute(insert(jobs), rows[begin : begin + ROWS_AT_ONCE])
    missed = [
        {
            "problem_id": problem_id(problem),
            "class_key": "AuthenticAMD-1a-2-avx512-00000000",
            "threads": 1,
            "regime": "hot",
            "problem": problem.text,
            "asked": number % 1000,
            "first_at": time_text(BEGIN),
            "last_at": time_text(BEGIN),
        }
        for number in range(MISSES)
        for problem in [replace(known[0], m=Rows(low=10_000 + number, high=10_000 + number))]
    ]
    connection.execute(insert(misses), missed)


def _decide(group: Sequence[Trial]) -> Verdict | None:
    """Return the verdict that trials allow, if it names a kernel."""
    verdict = derive_verdict(
        group,
        problem=group[0].problem,
        cpu_key=group[0].cpu.exact_key,
        context=group[0].context,
        complete=True,
    )
    return verdict if verdict.artifact is not None else None


def _add_cpu(connection: Connection, cpu: Cpu, known: set[str]) -> str:
    document = canonical_json(WireCpu.of(cpu).model_dump(mode="json"))
    key = digest_of(document)
    if key not in known:
        known.add(key)
        if connection.execute(select(cpus.c.id).where(cpus.c.id == key)).first() is None:
            connection.execute(
                insert(cpus).values(
                    id=key, document=document, exact_key=cpu.exact_key, class_key=cpu.class_key
                )
            )
    return key


def _trial_row(
    keys: MeasuringKeys, trial: Trial, document: str, problem_key: str, cpu_key: str
) -> _Row:
    signed = keys.attest(Statement.TRIAL, document)
    return {
        "id": digest_of(document),
        "document": document,
        "origin": Origin.MEASURED.value,
        "problem_id": problem_key,
        "cpu_id": cpu_key,
        "threads": trial.context.threads,
        "regime": trial.context.regime.value,
        "generator": trial.generator,
        "stage": trial.stage.value,
        "outcome": trial.outcome.value,
        "attested_by": signed.public_key,
        "attestation": signed.signature,
    }


def _flush(connection: Connection, table: Table, rows: list[_Row]) -> None:
    if rows:
        connection.execute(insert(table), rows)
        rows.clear()


def _tell(done: int, wanted: int, begin_s: float) -> None:
    left_s = (time.monotonic() - begin_s) / max(done, 1) * max(0, wanted - done)
    sys.stderr.write(f"\r{done:,} of {wanted:,} trials, {left_s:.0f} s left   ")
    sys.stderr.flush()
