"""The step for a CPU with unusable features: kernels timed on the same model with more of them.

So it is where the system refuses the permission to use AMX, or a virtual machine hides a feature.
"""

from dataclasses import replace

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.select.lookup import Lookup, Question
from gemm_tuner.select.sturdiest import sturdiest_of_fastest
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.store.repository import Repository


def same_model(question: Question) -> Lookup:
    """Look for kernels timed on this model with more features, of which they need none.

    The one whose calls took least time is a tie without a ratio: the baseline, too, had features
    that it lacks here. A kernel need not have come to the final there, which others may have won.
    """
    problem, cpu, context = question.problem, question.cpu, question.context
    from_trials = question.known.has_same_model
    trials = (
        _timed_with_more_features(question.repository, problem, cpu=cpu, context=context)
        if from_trials
        else {}
    )
    if not trials:
        reason = f"same_model: no kernel that can run here was timed on {cpu.model_key} with more."
        return Lookup(verdict=None, reason=reason, from_trials=from_trials)
    speeds = {one: 1 / _call_ns(trial) for one, trial in trials.items()}
    fastest = sturdiest_of_fastest(speeds, problem)
    verdict = Verdict(
        problem=problem,
        cpu_key=cpu.exact_key,
        context=context,
        decision=Decision.TIE,
        basis=Basis.SAME_MODEL,
        complete=False,
        candidate=fastest,
        artifact=trials[fastest].artifact,
        generator=trials[fastest].generator,
        tried_at=trials[fastest].created_at,
    )
    reason = (
        f"same_model: the fastest of {len(trials)} kernels that can run here and were timed on "
        f"{trials[fastest].cpu.exact_key}, which has more features."
    )
    return Lookup(verdict=verdict, reason=reason, from_trials=from_trials)


def _timed_with_more_features(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> dict[Candidate, Trial]:
    """Return the latest timing of each kernel, of the newest generator that has any in the store.

    None counts that failed on such a CPU, whatever its features.
    """
    trials = repository.trials(problem=problem, model_key=cpu.model_key)
    failed = {
        trial.artifact.sha256
        for trial in trials
        if trial.artifact and trial.outcome not in {Outcome.CORRECT, Outcome.HUNG}
    }
    runnable = [
        (trial, trial.artifact.sha256)
        for trial in trials
        if trial.measurement
        and trial.had_its_threads
        and trial.context == context
        and trial.cpu.isa > cpu.isa
        and trial.artifact
        and trial.artifact.required_isa <= cpu.isa
        and trial.artifact.sha256 not in failed
        and trial.candidate.micro_kernel.family in CATALOG
    ]
    held = repository.held_artifacts({digest for _trial, digest in runnable})
    usable = [trial for trial, digest in runnable if digest in held]
    return {trial.candidate: trial for trial in usable if trial.generator == usable[-1].generator}


def _call_ns(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.candidate.median_ns


def nameable_with_fewer_features(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> frozenset[str]:
    """Return the sha256 of each kernel that this step may name on the model of `cpu`.

    What can run on a CPU is what can run with the features that some of the kernels need together.
    """
    needs = {
        trial.artifact.required_isa
        for trial in repository.trials(problem=problem, model_key=cpu.model_key)
        if trial.artifact and trial.measurement and trial.context == context
    }
    usable: set[frozenset[IsaFeature]] = {frozenset()}
    for need in needs:
        usable |= {isa | need for isa in usable}
    return frozenset(
        trial.artifact.sha256
        for isa in usable
        for trial in _timed_with_more_features(
            repository, problem, cpu=replace(cpu, isa=isa), context=context
        ).values()
        if trial.artifact
    )
