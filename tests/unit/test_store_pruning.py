"""What no answer needs is removed, and nothing that is served."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from samples import CONTEXT, CPU, PROBLEM, add_build, make_failed_trial, make_trial
from sqlalchemy import Engine, func, select

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.select.choose import choose
from gemm_tuner.select.measured_range import measured_range
from gemm_tuner.select.same_model import nameable_with_fewer_features
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.maintenance.pruning import Pruning, PruningReport
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import sources

NOW = datetime(2027, 11, 20, tzinfo=UTC)  # a year after the samples
DAY = 24 * 60


def add(repository: Repository, name: bytes, trial: Trial) -> Artifact:
    artifact = add_build(repository, name)
    repository.add_trial(replace(trial, artifact=artifact))
    return artifact


def prune(
    engine: Engine, *, days: float = 180, pause: Callable[[float], None] = lambda _s: None
) -> PruningReport:
    repository, pruning = Repository(engine), Pruning(engine)
    plan = pruning.plan(
        before=NOW - timedelta(days=days),
        nameable=lambda trial: nameable_with_fewer_features(
            repository, trial.problem, cpu=trial.cpu, context=trial.context
        ),
    )
    return pruning.remove(plan, actor="me", now=NOW, pause=pause)


@pytest.fixture
def swept(repository: Repository) -> dict[str, Artifact]:
    """Return the kernels of a store in which an old and a new generator tuned a problem."""
    return {
        name: add(repository, name.encode(), trial)
        for name, trial in {
            "old race": make_trial(minute=1, nr=16, stage=Stage.RACE, generator="0.0.9"),
            "old final": make_trial(minute=2, nr=32, stage=Stage.FINAL, generator="0.0.9"),
            "old winner": make_trial(minute=3, stage=Stage.CONFIRM, generator="0.0.9"),
            "loser": make_trial(minute=4, nr=32, stage=Stage.FINAL, call_ns=900),
            "winner": make_trial(minute=5),
            "recent": make_trial(minute=300 * DAY, nr=16, stage=Stage.RACE, generator="0.0.9"),
            "failed": make_failed_trial(minute=6),
            "last": make_trial(minute=7, nr=16, stage=Stage.RACE, call_ns=950),
        }.items()
    }


def test_only_old_losers_go(
    engine: Engine, repository: Repository, swept: dict[str, Artifact]
) -> None:
    newest = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).serial

    report = prune(engine)

    gone = {name for name, artifact in swept.items() if not repository.holds(artifact)}
    assert gone == {"old race", "old final"}
    assert (report.trials, report.artifacts) == (2, 2)
    assert choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).serial == newest
    (entry,) = AuditLog(engine).newest(1)
    assert (entry.action, entry.detail) == ("prune", "2 trials, 2 kernels, 0 sources")


def test_every_answer_is_what_it_was(
    engine: Engine, repository: Repository, swept: dict[str, Artifact]
) -> None:
    cpus = [replace(CPU, isa=isa) for isa in (CPU.isa, frozenset({IsaFeature.AVX512F}))]
    before = [choose(repository, PROBLEM, cpu=cpu, context=CONTEXT) for cpu in cpus]

    prune(engine, days=0)

    assert [choose(repository, PROBLEM, cpu=cpu, context=CONTEXT) for cpu in cpus] == before
    assert {match.verdict.basis.value for match in before} == {"measured", "same_model"}
    assert swept


def test_the_time_over_m_of_a_library_for_a_range_stays(
    engine: Engine, repository: Repository
) -> None:
    one_m, of_range = (replace(PROBLEM, m=Rows(low=low, high=16)) for low in (16, 1))
    alone = make_trial(problem=one_m, minute=1)
    library = Candidate.parse(f"..4 {alone.candidate.text} | {alone.candidate.text}")
    add(repository, b"alone", alone)
    loser = make_trial(problem=one_m, minute=2, nr=32, stage=Stage.FINAL, generator="0.0.9")
    add(repository, b"loser", loser)
    digest = add(
        repository, b"library", make_trial(problem=of_range, candidate=library, minute=3)
    ).sha256
    add(repository, b"alone", make_trial(problem=one_m, minute=4, stage=Stage.FINAL))
    timed = make_trial(problem=one_m, candidate=library, minute=4, stage=Stage.FINAL, call_ns=810)
    add(repository, b"library", timed)
    add(repository, b"last", make_trial(problem=one_m, nr=16, minute=5, stage=Stage.RACE))
    before = measured_range(repository, digest, of_range, cpu=CPU, context=CONTEXT)

    report = prune(engine)

    assert report == PruningReport(trials=1, artifacts=1, sources=0)
    assert measured_range(repository, digest, of_range, cpu=CPU, context=CONTEXT) == before
    assert [one.rows for one in before] == [16]


def test_a_second_pruning_finds_nothing(engine: Engine, swept: dict[str, Artifact]) -> None:
    prune(engine)

    assert prune(engine) == PruningReport(trials=0, artifacts=0, sources=0)
    assert swept


def test_a_plan_changes_nothing(
    engine: Engine, repository: Repository, swept: dict[str, Artifact]
) -> None:
    trials = repository.trials()

    plan = Pruning(engine).plan(before=NOW, nameable=lambda _trial: ())

    assert len(plan.artifacts) > 2
    assert repository.trials() == trials
    assert all(map(repository.holds, swept.values()))


def test_a_source_that_no_kernel_has_goes(engine: Engine, repository: Repository) -> None:
    add_build(repository, b"a kernel without a trial")

    report = prune(engine)

    assert (report.artifacts, report.sources) == (1, 1)
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(sources)) == 0


def test_a_kernel_whose_trial_comes_while_it_is_removed_is_put_back(
    engine: Engine, repository: Repository
) -> None:
    artifact = add_build(repository, b"just built")

    def sweep(_seconds: float) -> None:
        repository.add_trial(make_trial(artifact=artifact))

    report = prune(engine, pause=sweep)

    assert report == PruningReport(trials=0, artifacts=0, sources=0)
    assert repository.holds(artifact)


def test_a_clock_that_was_ahead_leaves_what_was_tried_with_it(
    engine: Engine, repository: Repository
) -> None:
    for minute in (5000 * DAY, 5001 * DAY):
        repository.add_trial(make_trial(minute=minute, stage=Stage.RACE, measurement=None))

    assert prune(engine).trials == 0
