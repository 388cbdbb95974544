"""Look up the verdict for a question, step by step, with its reasons."""

from dataclasses import dataclass, replace

from gemm_tuner.answer.telling import sentences
from gemm_tuner.derive import no_verdict
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import counted
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.select.bucket import bucket
from gemm_tuner.select.lookup import Question, Source
from gemm_tuner.select.measured import exact, sibling
from gemm_tuner.select.predicted import predicted
from gemm_tuner.select.same_model import same_model
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.key_id import key_id_of

# What hosts confirmed by themselves, and what a kernel may be guessed from that one of them proved.
_MEASURED = (exact, sibling, bucket)
_GUESSED = (same_model, predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A verdict, and one sentence for each step of the lookup that was tried.

    `source` are the trials that tell of other kernels which could be served in the place of the
    verdict's, if any do. `serial` grows with what the store knows. A match that `is_lasting` stays
    the same until stored verdicts change.
    """

    verdict: Verdict
    explain: tuple[str, ...]
    serial: int
    is_lasting: bool
    source: Source | None = None


def choose(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Match:
    """Return the best-founded verdict for `problem` on `cpu` in `context`.

    What gives reason to doubt is the answer only where there is no other; it names no kernel.

    Raises:
        InvalidProblem: the problem multiplies nothing.
    """
    problem.check_work(context.regime)
    known = repository.known(problem, cpu=cpu, context=context)
    return match(Question(store=repository, problem=problem, cpu=cpu, context=context, known=known))


def match(question: Question) -> Match:
    """Return the best-founded verdict for a question, as `choose` does.

    Raises:
        InvalidProblem: the problem multiplies nothing.
        TrialsNeeded: trials must be read, and may not be.
    """
    problem, cpu = question.problem, question.cpu
    context, known = question.context, question.known
    problem.check_work(context.regime)
    explain: list[str] = []
    is_lasting = True
    doubted: Verdict | None = None
    ladder = _MEASURED if question.store.quorum() > 1 else (*_MEASURED, *_GUESSED)
    for look in ladder:
        lookup = look(question)
        is_lasting &= not lookup.from_trials
        explain.append(lookup.reason)
        if lookup.verdict is not None and (doubt := lookup.verdict.doubt):
            doubted = doubted or lookup.verdict
            explain.append(f"not believed: {doubt}.")
        elif lookup.verdict is not None:
            verdict = lookup.verdict
            if verdict.artifact is not None and verdict.attested_by is None:
                verdict = attested(question.repository, verdict)
            return Match(
                verdict=verdict,
                explain=(*explain[:-1], *sentences(verdict, lookup.reason)),
                serial=known.serial,
                is_lasting=is_lasting,
                source=lookup.source,
            )
    if known.imported:
        explain.append(
            f"imported: {counted(known.imported, 'record')} from elsewhere, not served before a "
            "sweep here."
        )
    if known.has_trials:
        explain.extend(_unbelieved(question.repository, problem))
        is_lasting = False
    if doubted is not None:
        explain.append(
            f"{doubted.decision.value}: nothing is decided by such a measurement, so no kernel is "
            'named; run "gemm-tuner sweep" again to measure it anew.'
        )
        return Match(
            verdict=doubted, explain=tuple(explain), serial=known.serial, is_lasting=is_lasting
        )
    explain.append('baseline: nothing is known; run "gemm-tuner sweep" to tune it here.')
    verdict = no_verdict(problem, cpu_key=cpu.exact_key, context=context)
    return Match(
        verdict=verdict, explain=tuple(explain), serial=known.serial, is_lasting=is_lasting
    )


def attested(repository: Repository, verdict: Verdict) -> Verdict:
    """Return a verdict with the id of the key that attests its kernel, if it names one."""
    if verdict.artifact is None or verdict.attested_by is not None:
        return verdict
    digest = verdict.artifact.sha256
    key = repository.held_artifacts([digest]).get(digest)
    if key is None:
        return replace(verdict, artifact=None)  # it was revoked just now
    return replace(verdict, attested_by=key_id_of(bytes.fromhex(key)))


def _unbelieved(repository: Repository, problem: Problem) -> list[str]:
    """Return why what the store holds of a problem is not served, one sentence for each reason."""
    told = [
        f"not served: {counted(count, 'trial')} of this problem, since {reason}."
        for reason, count in repository.unbelieved_trials(problem).items()
    ]
    digests = {
        trial.artifact.sha256 for trial in repository.trials(problem=problem) if trial.artifact
    }
    refused = repository.refused_artifacts(digests)
    told.extend(
        f"not served: the kernel {digest[:12]}, since {reason}."
        for digest, reason in sorted(refused.items())
    )
    return told
