"""The lookup for a CPU on which nothing was measured: what the model chose for such a core."""

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.select.lookup import Lookup, Question
from gemm_tuner.space.cores import core_of
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin


def predicted(question: Question) -> Lookup:
    """Look for kernels proved for the core of `cpu`, and name the one that the model ranks first.

    It is a tie without a ratio: its speed is not known, on this CPU or on any other.
    """
    problem, cpu, context = question.problem, question.cpu, question.context
    from_trials = question.known.has_predictions
    trials = _held(question) if from_trials else []
    if not trials:
        reason = f"predicted: no kernel was chosen for the core {core_of(cpu).cpu.brand}."
        return Lookup(verdict=None, reason=reason, from_trials=from_trials)
    best = trials[0]
    verdict = Verdict(
        problem=problem,
        cpu_key=cpu.exact_key,
        context=context,
        decision=Decision.TIE,
        basis=Basis.PREDICTED,
        complete=False,
        candidate=best.candidate,
        artifact=best.artifact,
        generator=best.generator,
        tried_at=best.created_at,
    )
    reason = (
        f"predicted: the model's first of {len(trials)} kernels that are proved for the core "
        f'{core_of(cpu).cpu.brand}; "gemm-tuner tune-shortlist" times them here.'
    )
    return Lookup(verdict=verdict, reason=reason, from_trials=from_trials)


def _held(question: Question) -> list[Trial]:
    """Return the proofs of kernels chosen for the core whose binaries the store has."""
    repository = question.repository
    chosen = shortlisted(
        repository, question.problem, cpu=question.cpu, threads=question.context.threads
    )
    held = repository.held_artifacts({one.artifact.sha256 for one in chosen if one.artifact})
    return [trial for trial in chosen if trial.artifact and trial.artifact.sha256 in held]


def shortlisted(
    repository: Repository,
    problem: Problem,
    *,
    cpu: Cpu,
    threads: int,
    origin: Origin | None = Origin.MEASURED,
) -> list[Trial]:
    """Return the proofs of kernels chosen for the core of `cpu` that it can run, best first.

    They are of the newest generator that has any. Regimes share them: the model does not tell them
    apart. None counts that failed later on such a CPU; what hung may have had too little time.
    """
    core = core_of(cpu)
    if not core.is_of(cpu):
        return []  # it only stands in for a core that is not known
    trials = repository.trials(problem=problem, origin=origin)
    of_core = [trial for trial in trials if core.is_of(trial.cpu) and trial.artifact is not None]
    failed = {
        trial.build for trial in of_core if trial.outcome not in {Outcome.CORRECT, Outcome.HUNG}
    }
    usable = [
        trial
        for trial in of_core
        if trial.stage is Stage.PREDICTED
        and trial.outcome is Outcome.CORRECT
        and trial.context.threads == threads
        and trial.build not in failed
        and trial.artifact
        and trial.artifact.required_isa <= cpu.isa
    ]
    from gemm_tuner.scaling.ranking import (  # noqa: PLC0415 - the space takes long to load
        ranked_on_server,
    )

    newest = {trial.candidate: trial for trial in usable if trial.generator == usable[-1].generator}
    try:
        order = ranked_on_server(newest, problem, cpu, threads)
        return [newest[candidate] for candidate in order]
    except InvalidCandidate:
        return []  # of a catalog that this version does not have
