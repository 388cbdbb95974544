"""Verdicts follow trials: those stored are those that the trials allow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from migrating import downgrade
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    SOURCE_TEXT,
    make_artifact,
    make_disturbed_trial,
    make_trial,
)
from sqlalchemy import Engine, event

from gemm_tuner.answer.document import Unsigned
from gemm_tuner.derive import derive_servable, runnable_trials
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database, writing
from gemm_tuner.store.sql.statements import RowsDamaged
from gemm_tuner.store.verdicts.asking import Asking, Found, ReadyAnswer
from gemm_tuner.store.verdicts.deriving import Deriving
from gemm_tuner.store.verdicts.verdicts import Known, StoredDocument
from gemm_tuner.trust.attestation import MeasuringKeys

COLD = ExecutionContext(regime=Regime.COLD_WEIGHTS)
OTHER_CLASS = replace(CPU, isa=CPU.isa | {IsaFeature.AVX512_VNNI})
CPUS = (CPU, SIBLING_CPU, OTHER_CLASS)
CONTEXTS = (CONTEXT, COLD)
PROBLEMS = (PROBLEM, replace(PROBLEM, m=Rows(low=1, high=256)))
BINARIES = {number: b"\x7fELF %d" % number for number in range(3)}


@dataclass(frozen=True, kw_only=True)
class _End:
    problem: Problem
    cpu: Cpu
    context: ExecutionContext
    is_exhausted: bool


_trials = st.builds(
    lambda **fields: fields,
    binary=st.sampled_from(sorted(BINARIES)),
    problem=st.sampled_from(PROBLEMS),
    cpu=st.sampled_from(CPUS),
    context=st.sampled_from(CONTEXTS),
    stage=st.sampled_from(list(Stage)),
    outcome=st.sampled_from([Outcome.CORRECT] * 4 + [Outcome.WRONG, Outcome.HUNG]),
    call_ns=st.sampled_from([700, 800, 1500]),
    is_disturbed=st.booleans(),
    generator=st.sampled_from(["0.1.0-aaaa", "0.2.0-bbbb"]),
)
_builds = st.sampled_from(sorted(BINARIES))
_ends = st.builds(
    _End,
    problem=st.sampled_from(PROBLEMS),
    cpu=st.sampled_from(CPUS),
    context=st.sampled_from(CONTEXTS),
    is_exhausted=st.booleans(),
)


@cache
def _empty_database() -> bytes:
    """Return the bytes of a new database: to migrate one for each example takes long."""
    with TemporaryDirectory() as folder:
        open_database(f"sqlite:///{folder}/store.sqlite3").dispose()
        return (Path(folder) / "store.sqlite3").read_bytes()


def _assert_is_right(repository: Repository, answer: ReadyAnswer | Found, question: Asking) -> None:
    """Check that an answer which is ready says what follows from the stored verdicts."""
    problem, cpu, context = question
    if isinstance(answer, Found):
        known = repository.known(problem, cpu=cpu, context=context)
        assert _told(repository.known_of(answer)) == _told(known)
        return
    best = choose(repository, problem, cpu=cpu, context=context)
    expected = Unsigned.of(best.verdict, best.explain).packed()
    assert answer == ReadyAnswer(expected, best.serial)
    assert best.is_lasting


@contextmanager
def _new_store() -> Iterator[Repository]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite3"
        path.write_bytes(_empty_database())
        engine = open_database(f"sqlite:///{path}")
        event.listen(
            engine,
            "connect",
            lambda connection, _entry: connection.execute("PRAGMA synchronous = OFF").close(),
        )
        yield Repository(engine)
        engine.dispose()


def _trial(fields: dict[str, object], minute: int) -> Trial:
    changes = dict(fields)
    binary, call_ns = changes.pop("binary"), changes.pop("call_ns")
    assert isinstance(binary, int)
    assert isinstance(call_ns, int)
    make = make_disturbed_trial if changes.pop("is_disturbed") else make_trial
    trial = make(call_ns=call_ns, nr=16 * (1 + binary), minute=minute)
    is_timed = changes["outcome"] is Outcome.CORRECT and changes["stage"] is not Stage.PREDICTED
    return replace(
        trial,
        artifact=make_artifact(BINARIES[binary]),
        measurement=trial.measurement if is_timed else None,
        **changes,  # type: ignore[arg-type]  # fields by name
    )


def _add_build(repository: Repository, number: int) -> None:
    binary = BINARIES[number]
    repository.add_build(make_artifact(binary), binary=binary, source_text=SOURCE_TEXT)


def _add(repository: Repository, steps: Sequence[object]) -> None:
    minutes = count()
    for step in steps:
        if isinstance(step, int):
            _add_build(repository, step)
        elif isinstance(step, dict):
            repository.add_trial(_trial(step, next(minutes)))
        elif isinstance(step, _End):
            trial = make_trial()
            repository.mark_ended(
                step.problem,
                step.cpu.exact_key,
                step.context,
                toolchain=trial.toolchain,
                generator=trial.generator,
                end=SweepEnd(baseline="onednn 3.2.0", is_exhausted=step.is_exhausted, budget_s=1.0),
            )


def _from_trials(
    repository: Repository, problem: Problem, cpu: Cpu, context: ExecutionContext, *, asker: Cpu
) -> Verdict | None:
    """Return the verdict that the trials on `cpu` allow for `asker`, without any stored one."""
    trials = [
        trial
        for trial in repository.trials(problem=problem, class_key=cpu.class_key)
        if trial.stage is Stage.CONFIRM or trial.outcome is not Outcome.CORRECT
        if trial.cpu == cpu or (asker != cpu and trial.outcome is not Outcome.CORRECT)
    ]
    runnable = runnable_trials(trials, context, asker.isa)
    verdict, _confirmed = derive_servable(
        runnable,
        problem=problem,
        cpu_key=asker.exact_key,
        basis=Basis.MEASURED if asker == cpu else Basis.SIBLING,
        held=repository.held_artifacts({t.artifact.sha256 for t in runnable if t.artifact}),
        exhausted=repository.exhausted(problem),
    )
    return verdict


def _rows(repository: Repository) -> list[tuple[object, ...]]:
    with repository._engine.connect() as connection:
        columns = (
            "problem_id, threads, regime, model_key, cpu_key, class_key, m_low, m_high, range_of, "
            "hint_of, imported, is_predicted, newest, artifact, document, class_artifact, "
            "class_document, lacking"
        )
        statement = f"SELECT {columns} FROM verdicts ORDER BY 1, 2, 3, 4, 5"  # noqa: S608
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def _told(known: Known | RowsDamaged) -> tuple[object, ...]:
    """Return what is known with each row as what it tells, without its number in the query."""
    assert isinstance(known, Known)
    verdicts = [one and (one.own(), one.of_class()) for one in (known.here, *known.siblings)]
    verdicts += [(one.own(), one.of_class()) for one in known.ranges]
    return verdicts, replace(known, here=None, siblings=(), ranges=())


@settings(max_examples=25)
@given(steps=st.lists(st.one_of(_trials, _trials, _builds, _ends), max_size=8))
def test_stored_verdicts_are_those_derived_from_scratch(steps: list[object]) -> None:
    with _new_store() as repository:
        _add(repository, steps)
        revoked = repository.revocations().artifacts

        def assert_same(found: Verdict | None, expected: Verdict | None) -> None:
            # Where the kernel of a stored verdict is revoked, it is not used.
            assert found == expected or (found is None and revoked)

        questions = [(problem, CPU, context) for problem in PROBLEMS for context in CONTEXTS]
        together = iter(repository.ready_each(questions))
        for problem in PROBLEMS:
            for context in CONTEXTS:
                known = repository.known(problem, cpu=CPU, context=context)
                _assert_is_right(repository, next(together), (problem, CPU, context))

                def found(
                    document: StoredDocument | None,
                    basis: Basis,
                    problem: Problem = problem,
                    context: ExecutionContext = context,
                ) -> Verdict | None:
                    if document is None:
                        return None
                    verdict = repository.verdict_of(
                        document,
                        problem=problem,
                        cpu_key=CPU.exact_key,
                        context=context,
                        basis=basis,
                    )
                    return verdict and replace(verdict, attested_by=None)

                own = known.here.own() if known.here else None
                expected = _from_trials(repository, problem, CPU, context, asker=CPU)
                assert_same(found(own, Basis.MEASURED), expected)

                of_sibling = [found(one.of_class(), Basis.SIBLING) for one in known.siblings]
                expected = _from_trials(repository, problem, SIBLING_CPU, context, asker=CPU)
                assert_same((of_sibling or [None])[0], expected)

        before = _rows(repository)
        repository.derive_again()
        assert _rows(repository) == before


@settings(max_examples=20)
@given(imported=st.lists(_trials, max_size=6), steps=st.lists(_trials, max_size=4))
def test_what_is_imported_is_counted_and_never_decides(
    imported: list[dict[str, object]], steps: list[object]
) -> None:
    with _new_store() as repository, _new_store() as without:
        for store in (repository, without):
            for number in BINARIES:
                _add_build(store, number)
            _add(store, steps)
        repository.add_imported(_trial(each, 100 + n) for n, each in enumerate(imported))

        known = repository.known(PROBLEM, cpu=CPU, context=CONTEXT)

        of_problem = [each for each in imported if each["problem"] == PROBLEM]
        assert known.imported == len(of_problem)
        ask = {"cpu": CPU, "context": CONTEXT}
        asked = (choose(one, PROBLEM, **ask).verdict for one in (repository, without))  # type: ignore[arg-type]  # by name
        assert len(set(asked)) == 1

        before = _rows(repository)
        repository.derive_again()
        assert _rows(repository) == before


def test_a_question_is_one_query(repository: Repository, engine: Engine) -> None:
    _add_build(repository, 0)
    fields = {"artifact": make_artifact(BINARIES[0])}
    repository.add_trial(make_trial(**fields))  # type: ignore[arg-type]  # by name
    statements: list[str] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _u, text, *_rest: statements.append(text)
    )

    service = Repository(engine, quorum=1)
    found = choose(service, PROBLEM, cpu=CPU, context=CONTEXT)
    by_sibling = choose(service, PROBLEM, cpu=SIBLING_CPU, context=CONTEXT)
    unknown = choose(service, replace(PROBLEM, n=64), cpu=CPU, context=CONTEXT)

    assert (found.verdict.basis, by_sibling.verdict.basis) == (Basis.MEASURED, Basis.SIBLING)
    assert unknown.verdict.basis is Basis.NONE
    assert len([text for text in statements if text != "BEGIN"]) == 3
    assert found.is_lasting
    assert by_sibling.is_lasting
    assert unknown.is_lasting


def test_many_questions_are_asked_together_and_answered_in_order(
    repository: Repository, engine: Engine
) -> None:
    repository.add_trial(make_trial())
    others = [replace(PROBLEM, n=8 * number) for number in range(1, 150)]
    statements: list[str] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _u, text, *_rest: statements.append(text)
    )

    asked = [(problem, CPU, CONTEXT) for problem in (*others, PROBLEM)]
    answers = Repository(engine, quorum=1).ready_each(asked)

    found = [repository.known_of(one) for one in answers if isinstance(one, Found)]
    has_trials = [known.has_trials for known in found]
    assert has_trials == [False] * len(others) + [True]
    assert _told(found[-1]) == _told(repository.known(PROBLEM, cpu=CPU, context=CONTEXT))
    # 128 questions, 16, 6 and one; PostgreSQL takes 256 at once.
    queries = {"sqlite": 4, "postgresql": 2}
    assert len([text for text in statements if text != "BEGIN"]) == queries[engine.dialect.name]
    assert repository.ready_each([]) == []


def test_the_query_searches_indexes_and_scans_nothing(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/plan.sqlite3")
    repository = Repository(engine)
    repository.add_trial(make_trial())
    seen: list[tuple[str, object]] = []
    event.listen(
        engine,
        "before_cursor_execute",
        lambda _c, _u, text, values, *_rest: seen.append((text, values)),
    )
    repository.ready_each([(PROBLEM, CPU, CONTEXT), (PROBLEM, SIBLING_CPU, COLD)])
    text, values = seen[-1]

    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()  # type: ignore[arg-type]  # as seen

    engine.dispose()
    details = [row[-1] for row in plan]
    scanned = {detail for detail in details if detail.startswith("SCAN")}
    assert scanned == {"SCAN asked", "SCAN 2 CONSTANT ROWS"}  # the questions themselves
    of_verdicts = [detail for detail in details if detail.startswith("SEARCH verdicts")]
    assert len(of_verdicts) == 3


def test_an_upgrade_derives_what_an_old_database_holds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(url)
    repository = Repository(engine)
    _add_build(repository, 0)
    repository.add_trial(make_trial(artifact=make_artifact(BINARIES[0])))
    repository.add_imported([make_trial(minute=1, nr=32)])
    expected = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)
    before = _rows(repository)
    with writing(engine).begin() as connection:
        downgrade(connection, "contributions")
    engine.dispose()

    engine = open_database(url)

    again = Repository(engine)
    assert choose(again, PROBLEM, cpu=CPU, context=CONTEXT) == replace(
        expected, source=expected.source, serial=2
    )
    assert _rows(again) == before
    engine.dispose()


def test_other_rules_derive_all_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(url)
    Repository(engine).add_trial(make_trial(call_ns=2000))
    with writing(engine).begin() as connection:
        connection.exec_driver_sql("UPDATE verdict_state SET rules = 0")
        connection.exec_driver_sql("UPDATE verdicts SET document = NULL")
    engine.dispose()

    engine = open_database(url)

    verdict = choose(Repository(engine), PROBLEM, cpu=CPU, context=CONTEXT).verdict
    assert verdict.basis is Basis.MEASURED
    engine.dispose()


def test_a_failure_leaves_neither_the_trial_nor_a_verdict(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("gemm_tuner.store.trials.Deriving.follow_trial", fail)
    with pytest.raises(RuntimeError):
        repository.add_trial(make_trial())

    assert repository.trials() == ()
    assert _rows(repository) == []


def test_each_change_is_counted(repository: Repository, engine: Engine) -> None:
    seen = [repository.changes()]

    def note() -> None:
        seen.append(repository.changes())

    repository.add_trial(make_trial(stage=Stage.RACE))
    note()
    repository.add_trial(make_trial())
    note()
    repository.add_imported([make_trial(minute=5)])
    note()
    _add(repository, [_End(problem=PROBLEM, cpu=CPU, context=CONTEXT, is_exhausted=True)])
    note()
    with writing(engine).begin() as connection:
        Deriving(connection, MeasuringKeys()).derive_all()
    note()
    repository.add_trial(make_trial(minute=9, stage=Stage.RACE))

    assert seen == sorted(set(seen))
    assert repository.changes() == seen[-1]
