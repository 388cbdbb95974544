from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    SOURCE_TEXT,
    add_build,
    make_artifact,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine, update

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, SweepEnd, Trial
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin, artifacts


def test_trials_come_back_whole_and_in_order(repository: Repository) -> None:
    trials = (make_trial(minute=2), make_failed_trial(minute=1), make_trial(minute=0, nr=32))
    for trial in trials:
        repository.add_trial(trial)

    assert repository.trials() == trials


def test_the_same_trial_is_kept_once(repository: Repository) -> None:
    repository.add_trial(make_trial())
    repository.add_trial(make_trial())

    assert repository.trials() == (make_trial(),)


def test_trials_are_found_by_each_part_of_their_key(repository: Repository) -> None:
    wanted = make_trial()
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    others = (
        make_trial(problem=replace(PROBLEM, n=3071)),
        make_trial(cpu=SIBLING_CPU),
        make_trial(context=cold),
        make_trial(generator="0.2.0-bbbb"),
        make_trial(stage=Stage.RACE),
    )
    for trial in (wanted, *others):
        repository.add_trial(trial)

    assert repository.trials(
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        generator=wanted.generator,
        only_decisive=True,
    ) == (wanted, others[2])
    assert len(repository.trials(class_key=CPU.class_key)) == 6
    assert repository.trials(cpu_key=SIBLING_CPU.exact_key) == (others[1],)


def test_failures_are_decisive_in_every_stage(repository: Repository) -> None:
    failed = replace(make_failed_trial(), stage=Stage.RACE)
    for trial in (
        make_trial(),
        failed,
        make_trial(stage=Stage.RACE),
        make_trial(stage=Stage.FINAL),
    ):
        repository.add_trial(trial)

    assert repository.trials(only_decisive=True) == (make_trial(), failed)


def test_imported_trials_are_kept_apart(repository: Repository) -> None:
    repository.add_trial(make_trial())

    added = repository.add_imported([make_trial(), make_trial(minute=1)])

    assert added == 1
    assert repository.trials() == (make_trial(),)
    assert repository.trials(origin=Origin.IMPORTED) == (make_trial(minute=1),)
    assert len(repository.trials(origin=None)) == 2


def test_pages_cover_all_trials_once(repository: Repository) -> None:
    trials = [make_trial(minute=minute) for minute in range(5)]
    for trial in trials:
        repository.add_trial(trial)

    first = repository.page(limit=2)
    assert first.next_after is not None
    second = repository.page(after=first.next_after, limit=3)

    assert [*first.trials, *second.trials] == trials
    assert second.next_after is None


def test_a_build_is_kept_with_its_source(repository: Repository) -> None:
    artifact = add_build(repository)
    add_build(repository)

    assert repository.binary(artifact.sha256) == b"\x7fELF sample"
    assert repository.source_text(artifact.sha256) == SOURCE_TEXT
    assert set(repository.held_artifacts([artifact.sha256, "0" * 64])) == {artifact.sha256}


def test_what_is_not_there_is_none(repository: Repository) -> None:
    assert repository.binary("0" * 64) is None
    assert repository.source_text("0" * 64) is None
    assert repository.cpu("none") is None


def test_bytes_under_a_false_name_are_refused(repository: Repository) -> None:
    with pytest.raises(StoreFailed, match="damaged"):
        repository.add_build(make_artifact(), binary=b"other", source_text=SOURCE_TEXT)
    with pytest.raises(StoreFailed, match="damaged"):
        repository.add_build(make_artifact(), binary=b"\x7fELF sample", source_text="other")


def test_a_cpu_is_found_by_its_key(repository: Repository) -> None:
    repository.add_trial(make_trial())

    assert repository.cpu(CPU.exact_key) == CPU


@pytest.mark.parametrize("at_once", [1, 500])
def test_cpus_are_found_by_their_keys(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("gemm_tuner.store.trials.ASKED_AT_ONCE", at_once)
    for cpu in (CPU, SIBLING_CPU):
        repository.add_trial(make_trial(cpu=cpu))
    keys = [SIBLING_CPU.exact_key, "none", "\0", CPU.exact_key, SIBLING_CPU.exact_key]

    assert repository.cpus(iter(keys)) == {
        SIBLING_CPU.exact_key: SIBLING_CPU,
        CPU.exact_key: CPU,
    }


def test_what_was_tried_for_one_m_of_a_layer_is_found(repository: Repository) -> None:
    ranged = Problem.parse("f32 1..256x3072x768 nk bias+gelu_erf")
    others = (replace(PROBLEM, k=1), Problem.parse("f32 128x3072x768"))
    for problem in (PROBLEM, ranged, *others):
        repository.add_trial(make_trial(problem=problem))

    assert repository.exact_of(ranged) == (PROBLEM,)


def test_the_last_end_of_a_sweep_is_kept_for_the_whole_key(repository: Repository) -> None:
    key = {"toolchain": "gcc 12.2.0", "generator": "0.1.0-aaaa"}
    first = SweepEnd(baseline="onednn 3.2.0", is_exhausted=False, budget_s=10.0)
    last = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=first)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=last)

    assert repository.sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **key) == (last,)
    assert repository.sweep_ends(PROBLEM, SIBLING_CPU.exact_key, CONTEXT, **key) == ()
    for other in (key | {"generator": "0.2.0-bbbb"}, key | {"packed_format": "f32 8x8 panels"}):
        assert repository.sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **other) == ()
    in_format = key | {"packed_format": "f32 8x8 panels"}
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **in_format, end=first)
    assert repository.sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **in_format) == (first,)
    assert repository.sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **key) == (last,)


def test_sweeps_beside_different_baselines_end_apart(repository: Repository) -> None:
    key = {"toolchain": "gcc 12.2.0", "generator": "0.1.0-aaaa"}
    short = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=10.0)
    long = SweepEnd(baseline="scalar_f32_1x1", is_exhausted=False, budget_s=30.0)
    for end in (short, long):
        repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=end)

    assert repository.sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **key) == (long, short)


@pytest.mark.parametrize(
    ("table", "read"),
    [
        ("trials", lambda repository: repository.trials()),
        ("cpus", lambda repository: repository.cpu(CPU.exact_key)),
        ("cpus", lambda repository: repository.cpus([CPU.exact_key])),
        ("problems", lambda repository: repository.exact_of(PROBLEM)),
    ],
)
def test_a_changed_document_is_noticed(
    engine: Engine, repository: Repository, table: str, read: Callable[[Repository], object]
) -> None:
    ranged = Problem.parse("f32 1..256x3072x768 nk bias+gelu_erf")
    repository.add_trial(make_trial(problem=ranged))
    with engine.begin() as connection:
        statement = f"UPDATE {table} SET document = replace(document, '6', '7')"  # noqa: S608
        connection.exec_driver_sql(statement)

    with pytest.raises(StoreFailed, match="damaged"):
        read(repository)


@pytest.mark.parametrize("content", [b"", b"not compressed"])
def test_a_changed_binary_is_noticed(
    engine: Engine, repository: Repository, content: bytes
) -> None:
    artifact = add_build(repository)
    with engine.begin() as connection:
        connection.execute(update(artifacts).values(compressed_binary=content))

    with pytest.raises(StoreFailed, match="damaged"):
        repository.binary(artifact.sha256)


def test_a_vanished_table_is_a_clear_error(engine: Engine, repository: Repository) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE trials")

    with pytest.raises(StoreFailed, match=r"no such table|does not exist"):
        repository.add_trial(make_trial())


def test_others_can_write_while_a_large_import_runs(
    repository: Repository, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.trials.IMPORTED_AT_ONCE", 2)
    sweeping = Repository(engine)

    def trials() -> Iterator[Trial]:
        for minute in range(5):
            if minute == 4:
                sweeping.add_trial(make_trial(minute=100))
            yield make_trial(minute=minute)

    assert repository.add_imported(trials()) == 5
    assert repository.trials() == (make_trial(minute=100),)


def test_a_binary_that_grows_beyond_bounds_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.integrity.MAX_CONTENT_BYTES", 1000)
    bomb = bytes(10**6)
    artifact = add_build(repository, bomb)

    with pytest.raises(StoreFailed, match="more than 1000 bytes"):
        repository.binary(artifact.sha256)
    assert not repository.holds(artifact)
