"""Databases to load the service with: many verdicts, or many trials of one problem."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from hashlib import sha256
from itertools import islice
from typing import Any

from sqlalchemy import Engine, insert, select, update

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.store.exchange import shipped_records
from gemm_tuner.store.integrity import content_of
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database, writing
from gemm_tuner.store.sql.tables import artifacts, problems, trials, verdict_state, verdicts
from gemm_tuner.store.verdicts.deriving import layer_id, statement
from gemm_tuner.store.verdicts.figures import figure_columns, shape_columns
from gemm_tuner.store.verdicts.ready import HeldArtifact, sealed_answer
from gemm_tuner.store.wire.record import dump_record
from gemm_tuner.store.wire.verdict import dump_verdict
from gemm_tuner.trust.attestation import MeasuringKeys, Statement

CPUS = 50
KERNELS = 64
ROWS_AT_ONCE = 5000
CONTEXT = ExecutionContext(threads=1, regime=Regime.HOT)
SOURCE = "// a placeholder\n"


def fill(url: str, count: int) -> float:
    """Make a database with `count` verdicts, and return how many seconds that took."""
    begin_s = time.monotonic()
    engine = open_database(url)
    repository, keys = Repository(engine), MeasuringKeys()
    samples = sample_verdicts()
    for number, sample in enumerate(samples[:KERNELS]):
        assert sample.artifact is not None
        repository.add_build(sample.artifact, binary=binary_of(number), source_text=SOURCE)
    known = set[str]()
    with writing(engine).begin() as connection:
        columns = (getattr(artifacts.c, field.name) for field in fields(HeldArtifact))
        builds = [HeldArtifact(**row) for row in connection.execute(select(*columns)).mappings()]
        held = {build.sha256: build for build in builds}
        rows = (
            verdict_row(keys, verdict, cpu, held) for verdict, cpu in each_verdict(samples, count)
        )
        while some := list(islice(rows, ROWS_AT_ONCE)):
            new = {row["problem_id"]: problem for row, problem in some}
            fresh = [problem_row(each) for key, each in new.items() if key not in known]
            known |= new.keys()
            if fresh:
                connection.execute(insert(problems), fresh)
            connection.execute(insert(verdicts), [row for row, _problem in some])
        connection.execute(update(verdict_state).values(changes=verdict_state.c.changes + 1))
    engine.dispose()
    return time.monotonic() - begin_s


def fill_with_trials(engine: Engine, counts: Sequence[int]) -> list[Trial]:
    """Return a trial of a problem for each count, of which the database then has so many."""
    repository, keys = Repository(engine), MeasuringKeys()
    first = next(
        trial
        for trial in shipped_records()
        if trial.context == CONTEXT and trial.stage is Stage.CONFIRM and trial.artifact is not None
    )
    assert first.artifact is not None
    artifact = placeholder(first.artifact, 0)
    repository.add_build(artifact, binary=binary_of(0), source_text=SOURCE)
    found = []
    for number, count in enumerate(counts, start=1):
        problem = replace(first.problem, n=16 * number)
        trial = replace(first, problem=problem, artifact=artifact)
        repository.add_trial(trial)
        _repeat(engine, keys, trial, count - 1)
        found.append(trial)
    repository.derive_again()
    return found


def _repeat(engine: Engine, keys: MeasuringKeys, trial: Trial, count: int) -> None:
    """Add a trial `count` times more, each of another second."""
    with writing(engine).begin() as connection:
        same = sha256(dump_record(trial).encode()).hexdigest()
        known = connection.execute(select(trials).where(trials.c.id == same)).mappings().one()
        rows = []
        for number in range(1, count + 1):
            again = replace(trial, created_at=trial.created_at + timedelta(seconds=number))
            document = dump_record(again)
            signed = keys.attest(Statement.TRIAL, document)
            changed = {
                "id": sha256(document.encode()).hexdigest(),
                "document": document,
                "attested_by": signed.public_key,
                "attestation": signed.signature,
            }
            rows.append({name: known[name] for name in known if name != "sequence"} | changed)
        if rows:
            connection.execute(insert(trials), rows)


@cache
def sample_verdicts() -> list[Verdict]:
    """Return the verdicts that shipped records allow, with placeholders as kernels."""
    groups: dict[tuple[Problem, str], list[Trial]] = {}
    for trial in shipped_records():
        if trial.context == CONTEXT and trial.problem.m.exact is not None:
            groups.setdefault((trial.problem, trial.generator), []).append(trial)
    found = []
    for (problem, _generator), of_problem in groups.items():
        verdict = derive_verdict(
            of_problem,
            problem=problem,
            cpu_key=of_problem[0].cpu.exact_key,
            context=CONTEXT,
            complete=True,
        )
        if verdict.artifact is not None:
            artifact = placeholder(verdict.artifact, len(found) % KERNELS)
            found.append(replace(verdict, artifact=artifact))
    if not found:
        raise SystemExit("no shipped record confirms a kernel")
    return found


def binary_of(number: int) -> bytes:
    """Return the bytes that stand for a kernel."""
    return f"placeholder {number}".encode()


def placeholder(artifact: Artifact, number: int) -> Artifact:
    """Return the description of a placeholder, else as that of `artifact`."""
    return replace(
        artifact,
        sha256=sha256(binary_of(number)).hexdigest(),
        size_bytes=len(binary_of(number)),
        source_sha256=sha256(SOURCE.encode()).hexdigest(),
    )


@cache
def cpus() -> list[Cpu]:
    """Return CPUs that differ from one in the records by model and stepping."""
    first = next(shipped_records()).cpu
    return [replace(first, model=1 + number // 4, stepping=number % 4) for number in range(CPUS)]


def each_problem(samples: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield sample verdicts for more and more problems, which differ in m."""
    m = 1
    while True:
        for number, sample in enumerate(samples):
            # Each sample has columns of its own, so that no two problems are the same.
            problem = replace(sample.problem, m=Rows(low=m, high=m), n=16 * (number + 1))
            yield replace(sample, problem=problem)
        m += 1


def each_verdict(samples: Sequence[Verdict], count: int) -> Iterator[tuple[Verdict, Cpu]]:
    """Yield `count` verdicts, problem by problem for all CPUs."""
    everywhere = ((verdict, cpu) for verdict in each_problem(samples) for cpu in cpus())
    return islice(everywhere, count)


def problem_row(problem: Problem) -> dict[str, Any]:
    """Return a row as the store writes it."""
    return {
        "id": problem_id(problem),
        "document": canonical_json(problem.text),
        "n": problem.n,
        "k": problem.k,
        "types": problem.types.text,
        "w_layout": problem.layout_text,
        "epilogue": problem.epilogue.text,
    }


def verdict_row(
    keys: MeasuringKeys,
    verdict: Verdict,
    cpu: Cpu,
    held: Mapping[str, HeldArtifact],
    trials_of: Sequence[Trial] = (),
) -> tuple[dict[str, Any], Problem]:
    """Return a row as the store writes it, attested by the user's measuring key."""
    here = replace(verdict, cpu_key=cpu.exact_key)
    problem, document = verdict.problem, dump_verdict(verdict)
    key = problem_id(problem)
    context = verdict.context
    signed = keys.attest(Statement.VERDICT, statement("", key, cpu.exact_key, context, document))
    assert verdict.artifact is not None
    row = {
        "problem_id": key,
        "threads": context.threads,
        "regime": context.regime.value,
        "model_key": cpu.model_key,
        "cpu_key": cpu.exact_key,
        "class_key": cpu.class_key,
        "m_low": problem.m.low,
        "m_high": problem.m.high,
        "imported": 0,
        "is_predicted": False,
        "newest": 1,
        "serial": 1,
        "artifact": verdict.artifact.sha256,
        **shape_columns(problem, layer_id(problem)),
        **figure_columns(here, trials_of),
        "document": document,
        "attested_by": signed.public_key,
        "attestation": content_of(signed),
        "answer": sealed_answer(
            keys,
            here,
            attestation=content_of(signed),
            rests_on=(),
            held=held[verdict.artifact.sha256],
        ),
    }
    return row, problem
