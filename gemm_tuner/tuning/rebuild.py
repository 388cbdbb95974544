"""Rebuild kernels of verdicts that the store has lost; their records stand."""

from collections.abc import Callable, Iterable

from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Built


def rebuild_lost(
    trials: Iterable[Trial], repository: Repository, build: Callable[[Candidate], Built]
) -> str:
    """Keep the binaries and sources of finalists anew that are damaged or missing; say so.

    The same source and compiler give the same bytes, so what was measured of them stands. Empty if
    nothing was lost.

    Raises:
        StoreFailed: the database does not answer.
    """
    finalists = {
        trial.artifact.sha256: (trial.artifact, trial.candidate)
        for trial in trials
        if trial.stage in {Stage.FINAL, Stage.CONFIRM}
        and trial.outcome is Outcome.CORRECT
        and trial.artifact is not None
    }
    notes = []
    for sha256, (artifact, candidate) in finalists.items():
        if repository.holds(artifact):
            continue
        built = build(candidate)
        if isinstance(built, Build) and built.artifact.sha256 == sha256:
            repository.replace_build(artifact, binary=built.binary, source_text=built.source.text)
            notes.append(
                f"the kernel {sha256[:12]} was damaged or missing in the database; "
                "it was built again."
            )
        else:
            notes.append(
                f"the kernel {sha256[:12]} is damaged or missing in the database, and "
                f"{_reason_why_lost(candidate, built)}"
            )
    return " ".join(notes)


def _reason_why_lost(candidate: Candidate, built: Built) -> str:
    if isinstance(built, CompilationInterrupted):
        return f"{candidate.text} could not be built again: {built}"
    restore = "restore the database from a backup, or start a new one with --db."
    if isinstance(built, CompilationFailed):
        first_line = str(built).partition("\n")[0].removesuffix(":")
        return f"the compiler refuses {candidate.text} now ({first_line}); {restore}"
    return f"{candidate.text} is not the same when it is built again; {restore}"
