"""What is said of kernels that the store has lost; test_sweep.py builds them again."""

import pytest
from samples import SOURCE_TEXT, add_build, make_artifact, make_trial

from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Built
from gemm_tuner.tuning.rebuild import rebuild_lost

BINARY = b"\x7fELF sample"
RESTORE = "restore the database from a backup, or start a new one with --db."


def _build_of(binary: bytes) -> Build:
    return Build(artifact=make_artifact(binary), source=Source(text=SOURCE_TEXT), binary=binary)


def test_what_is_built_to_the_same_bytes_is_kept_again(repository: Repository) -> None:
    note = rebuild_lost([make_trial()], repository, lambda _candidate: _build_of(BINARY))

    assert note.endswith("was damaged or missing in the database; it was built again.")
    assert repository.binary(make_artifact().sha256) == BINARY


@pytest.mark.parametrize(
    ("built", "reason"),
    [
        (
            _build_of(b"\x7fELF other"),
            f"CANDIDATE is not the same when it is built again; {RESTORE}",
        ),
        (
            CompilationFailed("gcc 13: no such name at line 2 of the source:\n> 2 | name"),
            "the compiler refuses CANDIDATE now (gcc 13: no such name at line 2 of the source); "
            + RESTORE,
        ),
        (
            CompilationInterrupted("gcc 12 was ended by a signal: ; run it again."),
            "CANDIDATE could not be built again: gcc 12 was ended by a signal: ; run it again.",
        ),
    ],
)
def test_why_a_lost_kernel_stays_lost_is_said(
    built: Built, reason: str, repository: Repository
) -> None:
    trial = make_trial()

    note = rebuild_lost([trial], repository, lambda _candidate: built)

    said = note.partition(" is damaged or missing in the database, and ")[2]
    assert said == reason.replace("CANDIDATE", trial.candidate.text)
    assert repository.binary(make_artifact().sha256) is None


def test_nothing_is_built_where_nothing_is_lost(repository: Repository) -> None:
    add_build(repository)

    def refuse(_candidate: Candidate) -> Built:
        raise AssertionError("it was built.")

    assert rebuild_lost([make_trial()], repository, refuse) == ""
