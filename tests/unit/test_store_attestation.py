"""What the store believes of its own rows: not more than who measured attested."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from migrating import downgrade
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SOURCE_TEXT,
    add_build,
    make_artifact,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine, text

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import StoreFailed
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.store.maintenance.checking import check_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database, writing
from gemm_tuner.store.sql.tables import Origin
from gemm_tuner.store.wire.record import dump_record
from gemm_tuner.store.wire.verdict import dump_verdict, load_verdict
from gemm_tuner.trust.attestation import MeasuringKeys

ATTACKERS = b"\x7fELF of an attacker"


@pytest.fixture
def foreign(engine: Engine, tmp_path: Path) -> Repository:
    """Return the same database, as another user writes it."""
    return Repository(engine, MeasuringKeys(tmp_path / "foreign"))


def ask(repository: Repository) -> Match:
    return choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)


def measure(repository: Repository) -> str:
    artifact = add_build(repository)
    repository.add_trial(make_trial())
    return artifact.sha256


def rewrite_trial(engine: Engine, *, attestation_of_old: bool) -> None:
    """Make the trial name the attacker's library; its digest fits."""
    document = dump_record(make_trial(artifact=make_artifact(ATTACKERS)))
    kept = "" if attestation_of_old else ", attested_by = NULL, attestation = NULL"
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE trials SET id = :id, document = :document{kept}"),  # noqa: S608
            {"id": sha256(document.encode()).hexdigest(), "document": document},
        )


def rewrite_artifact(engine: Engine, *, description: str | None = None) -> None:
    """Put the attacker's library in the place of the kernel; its digest fits."""
    digest = sha256(ATTACKERS).hexdigest()
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE artifacts SET sha256 = :digest, compressed_binary = :binary, "
                "document = coalesce(:document, document)"
            ),
            {"digest": digest, "binary": zlib.compress(ATTACKERS), "document": description},
        )


def test_what_is_attested_here_is_served_with_the_key(repository: Repository) -> None:
    measure(repository)

    match = ask(repository)

    assert match.verdict.attested_by is not None
    assert f"measuring key {match.verdict.attested_by}" in match.explain[0]


@pytest.mark.parametrize("attestation_of_old", [True, False])
def test_a_rewritten_trial_is_not_served(
    repository: Repository, engine: Engine, *, attestation_of_old: bool
) -> None:
    measure(repository)
    add_build(repository, ATTACKERS)
    assert ask(repository).verdict.artifact is not None

    genuine = ask(repository).verdict.artifact
    rewrite_trial(engine, attestation_of_old=attestation_of_old)
    assert ask(repository).verdict.artifact == genuine  # stored, and attested, before
    repository.derive_again()

    match = ask(repository)
    assert match.verdict.basis is Basis.NONE
    told = "not of these bytes" if attestation_of_old else "records attest"
    assert any("not served: 1 trial" in step and told in step for step in match.explain)


@pytest.mark.parametrize("change", [("document", "'{}'"), ("cpu_key", "'x'"), ("threads", "2")])
def test_a_rewritten_verdict_is_not_believed(
    repository: Repository, engine: Engine, change: tuple[str, str]
) -> None:
    measure(repository)
    attackers = add_build(repository, ATTACKERS)
    genuine = ask(repository).verdict
    assert genuine.artifact is not None
    column, value = change
    digests = (genuine.artifact.sha256, attackers.sha256)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE verdicts SET document = replace(document, '{}', '{}')".format(*digests)  # noqa: S608
        )

    assert ask(repository).verdict == genuine  # from trials
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE verdicts SET {column} = {value}")  # noqa: S608
    assert ask(repository).verdict.artifact in {None, genuine.artifact}


@pytest.mark.parametrize("is_described", [True, False])
def test_a_swapped_artifact_is_not_served(
    repository: Repository, engine: Engine, *, is_described: bool
) -> None:
    measure(repository)
    description = json.dumps({"sha256": sha256(ATTACKERS).hexdigest()})

    rewrite_artifact(engine, description=description if is_described else None)
    rewrite_trial(engine, attestation_of_old=True)

    assert ask(repository).verdict.artifact is None
    assert repository.binary(sha256(ATTACKERS).hexdigest()) is None


def test_a_range_that_was_widened_holds_what_it_was_measured_for(
    repository: Repository, engine: Engine
) -> None:
    add_build(repository)
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows(low=64, high=128))))
    inside, outside = (replace(PROBLEM, m=Rows(low=m, high=m)) for m in (100, 200))
    for low, high in ((64, 128), (1, 1000), (1000, 1)):
        with engine.begin() as connection:
            columns = {"low": low, "high": high}
            connection.execute(text("UPDATE verdicts SET m_low = :low, m_high = :high"), columns)

        found = choose(repository, inside, cpu=CPU, context=CONTEXT).verdict.artifact
        assert (found is not None) is (low == 64)
        assert choose(repository, outside, cpu=CPU, context=CONTEXT).verdict.artifact is None


def test_a_verdict_moved_to_another_class_is_not_believed(
    repository: Repository, engine: Engine
) -> None:
    measure(repository)
    other = replace(CPU, isa=CPU.isa - {IsaFeature.FMA})
    assert other.class_key != CPU.class_key
    with engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET class_key = :key"), {"key": other.class_key})

    match = choose(repository, PROBLEM, cpu=other, context=CONTEXT)

    assert match.verdict.basis is not Basis.SIBLING


def test_an_artifact_that_someone_else_attests_is_refused_with_the_key(
    repository: Repository, foreign: Repository
) -> None:
    add_build(foreign)
    repository.add_trial(make_trial())

    match = ask(repository)

    assert match.verdict.artifact is None
    attested_by = MeasuringKeys(foreign._keys.own_path.parent).own()
    assert any(
        "not served: the kernel" in step and f"keys accept {attested_by}" in step
        for step in match.explain
    )


def test_measurements_of_another_user_are_served_once_their_key_is_accepted(
    engine: Engine, foreign: Repository, tmp_path: Path
) -> None:
    measure(foreign)
    keys = MeasuringKeys(tmp_path / "reader")
    reader = Repository(engine, keys)
    public_key = foreign._keys.own()
    assert public_key is not None

    refused = ask(reader)
    keys.accept(public_key)
    accepted = ask(reader)

    assert refused.verdict.artifact is None
    assert any(f"keys accept {public_key}" in step for step in refused.explain)
    assert accepted.verdict.artifact is not None


def test_a_verdict_is_not_believed_once_the_key_under_its_trials_is_forgotten(
    engine: Engine, foreign: Repository, tmp_path: Path
) -> None:
    """Also where the reader derived and attested it, and has the same kernel as a build."""
    measure(foreign)
    keys = MeasuringKeys(tmp_path / "reader")
    reader = Repository(engine, keys)
    foreign_key = foreign._keys.own()
    assert foreign_key is not None
    keys.accept(foreign_key)
    reader.derive_again()
    reader.replace_build(make_artifact(), binary=b"\x7fELF sample", source_text=SOURCE_TEXT)
    assert ask(reader).verdict.artifact is not None

    keys.forget(foreign_key)

    match = ask(reader)
    assert match.verdict.artifact is None
    assert match.verdict.measurement is None
    assert any(f"keys accept {foreign_key}" in step for step in match.explain)


def test_a_verdict_without_its_keys_is_of_an_older_version_and_not_believed() -> None:
    verdict = derive_verdict(
        [make_trial()], problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )
    facts = json.loads(dump_verdict(verdict, rests_on=["key"]))

    def load() -> tuple[Verdict, frozenset[str]]:
        return load_verdict(
            json.dumps(facts),
            problem=PROBLEM,
            cpu_key=CPU.exact_key,
            context=CONTEXT,
            basis=Basis.MEASURED,
        )

    assert load() == (verdict, frozenset({"key"}))
    del facts["rests_on"]
    assert load() == (verdict, frozenset({""}))


def test_an_imported_trial_that_poses_as_measured_stays_a_hint(
    repository: Repository, engine: Engine
) -> None:
    add_build(repository)
    repository.add_imported([make_trial()])
    with engine.begin() as connection:
        connection.execute(text("UPDATE trials SET origin = 'measured'"))

    assert ask(repository).verdict.artifact is None
    assert repository.trials() == ()
    assert repository.trials(origin=None) == (make_trial(),)


def test_a_failure_counts_whoever_wrote_it(repository: Repository, foreign: Repository) -> None:
    measure(repository)

    foreign.add_trial(make_failed_trial(minute=1))

    assert ask(repository).verdict.artifact is None


def test_measuring_again_attests_a_build_that_nobody_attested(
    repository: Repository, engine: Engine
) -> None:
    digest = measure(repository)
    with engine.begin() as connection:
        connection.execute(text("UPDATE artifacts SET attested_by = NULL, attestation = NULL"))
    assert not repository.holds(make_artifact())

    add_build(repository)

    assert repository.binary(digest) is not None
    assert ask(repository).verdict.artifact is not None


@pytest.fixture
def old_database(tmp_path: Path) -> Iterator[Repository]:
    """Yield a database from before attestations, brought up to date."""
    path = tmp_path / "old.sqlite3"
    engine = open_database(f"sqlite:///{path}")
    measure(Repository(engine))
    engine.dispose()
    engine = open_database(f"sqlite:///{path}")
    with writing(engine).begin() as connection:
        downgrade(connection, "access")
    engine.dispose()
    engine = open_database(f"sqlite:///{path}")
    yield Repository(engine)
    engine.dispose()


def test_an_old_database_is_served_once_its_reader_attests_it(old_database: Repository) -> None:
    before = ask(old_database)

    counts = (old_database.attest_trials(), old_database.attest_artifacts())

    assert before.verdict.artifact is None
    assert any("gemm-tuner records attest" in step for step in before.explain)
    assert counts == (1, 1)
    assert ask(old_database).verdict.artifact is not None
    assert (old_database.attest_trials(), old_database.attest_artifacts()) == (0, 0)


def test_what_is_damaged_or_imported_is_not_attested(
    repository: Repository, engine: Engine
) -> None:
    repository.add_imported([make_trial()])
    add_build(repository)
    rewrite_artifact(engine)

    assert (repository.attest_trials(), repository.attest_artifacts()) == (0, 0)
    assert repository.trials(origin=Origin.IMPORTED) == (make_trial(),)


def plant_trial(engine: Engine) -> None:
    """Insert a trial with invented times, which nobody attests, in a row that says it failed."""
    document = dump_record(make_trial(artifact=make_artifact(ATTACKERS), call_ns=1, minute=1))
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO trials (id, document, origin, problem_id, cpu_id, threads, regime, "
                "generator, stage, outcome) SELECT :id, :document, origin, problem_id, cpu_id, "
                "threads, regime, generator, stage, 'wrong' FROM trials"
            ),
            {"id": sha256(document.encode()).hexdigest(), "document": document},
        )
        connection.execute(text("UPDATE verdicts SET document = NULL"))


def test_a_trial_that_poses_as_a_failure_is_not_served(
    repository: Repository, engine: Engine
) -> None:
    measure(repository)
    add_build(repository, ATTACKERS)
    plant_trial(engine)

    for read in (
        lambda: ask(repository),
        lambda: repository.trials(problem=PROBLEM),
        lambda: repository.unbelieved_trials(PROBLEM),
        repository.attest_trials,
        repository.derive_again,
    ):
        with pytest.raises(StoreFailed, match=r"other values in its columns \(outcome\)"):
            read()
    (damage,) = check_database(engine, lambda *_progress: None).damages
    assert "other values in its columns (outcome)" in damage


@pytest.mark.parametrize(
    "change",
    [
        "trials SET threads = 2",
        "trials SET regime = 'cold_weights'",
        "trials SET stage = 'race'",
        "trials SET generator = 'another'",
        "trials SET problem_id = (SELECT id FROM problems WHERE n = 3071)",
        "cpus SET exact_key = 'another'",
        "cpus SET class_key = 'another'",
    ],
)
def test_a_trial_is_not_moved_to_another_question(
    repository: Repository, engine: Engine, change: str
) -> None:
    measure(repository)
    repository.add_imported([make_trial(problem=replace(PROBLEM, n=3071))])
    assert len(repository.trials()) == 1

    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {change}"))

    column = change.partition(" SET ")[2].split()[0]
    with pytest.raises(StoreFailed, match=rf"other values in its columns \({column}\)"):
        repository.trials()


def test_a_fault_of_the_files_of_keys_is_one_of_the_store(engine: Engine, tmp_path: Path) -> None:
    keys = MeasuringKeys(tmp_path / "keys")
    repository = Repository(engine, keys)
    digest = measure(repository)
    keys.own_path.chmod(0o644)

    for read in (
        lambda: ask(repository),
        repository.trials,
        repository.believed_keys,
        lambda: repository.held_artifacts([digest]),
    ):
        with pytest.raises(StoreFailed, match="can be read by other users"):
            read()
