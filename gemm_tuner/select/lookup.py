"""The answer of one step of the lookup, and what it may rest on."""

from dataclasses import dataclass

from gemm_tuner.derive import Asked, derive_for_hosts, runnable_trials, split_by_cpu
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.verdicts.verdicts import Known, KnownVerdict


class TrialsNeeded(Exception):
    """An answer takes longer than to read stored verdicts: trials must be read for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem for a CPU and context, the store that is asked, and what it knows of it.

    Where the answer is wanted quickly, or not at all, trials may not be read.
    """

    store: Repository
    problem: Problem
    cpu: Cpu
    context: ExecutionContext
    known: Known
    may_read_trials: bool = True

    @property
    def repository(self) -> Repository:
        """Return the store, to read trials.

        Raises:
            TrialsNeeded: they may not be read.
        """
        if not self.may_read_trials:
            raise TrialsNeeded
        return self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The trials that a verdict was derived from: of which problem, on which CPU.

    What failed on other CPUs of the class counts too if it is `of_class`.
    """

    problem: Problem
    cpu_key: str
    of_class: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A verdict, or none, and the sentence that explains it.

    `source` are the trials that it was derived from, where these tell of other kernels that could
    be served in its place. What was read from trials, and not from stored verdicts, is
    `from_trials`: other trials may change it without a change of a verdict.
    """

    verdict: Verdict | None
    reason: str
    source: Source | None = None
    from_trials: bool = False


def servable(
    repository: Repository,
    source: Source,
    *,
    problem: Problem,
    cpu: Cpu,
    context: ExecutionContext,
    basis: Basis,
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return what the trials of `source` allow now, as `derive_for_hosts` does."""
    decisive = repository.attested_trials(
        problem=source.problem, class_key=cpu.class_key, only_decisive=True
    )
    own, others = split_by_cpu(decisive, source.cpu_key, of_class=source.of_class)
    runnable = runnable_trials([one.trial for one in own], context, cpu.isa)
    asked = Asked(
        problem=problem,
        cpu_key=cpu.exact_key,
        context=context,
        isa=cpu.isa,
        basis=basis,
        held=repository.held_artifacts({t.artifact.sha256 for t in runnable if t.artifact}),
        exhausted=repository.exhausted(source.problem),
    )
    return derive_for_hosts(own, others, asked, quorum=repository.quorum())


def stored(
    question: Question, source: Source, known: KnownVerdict, basis: Basis
) -> tuple[Verdict | None, bool]:
    """Return a stored verdict as the answer to a question, and whether it came from trials.

    Where it is not believed here, or the kernel that it names is lost, it is derived from trials.
    """
    document = known.of_class() if basis is Basis.SIBLING else known.own()
    verdict = None
    if document is not None:
        verdict = question.store.verdict_of(
            document,
            problem=question.problem,
            cpu_key=question.cpu.exact_key,
            context=question.context,
            basis=basis,
        )
    if verdict is not None or not known.newest:
        return verdict, False
    verdict, _confirmed = servable(
        question.repository,
        source,
        problem=question.problem,
        cpu=question.cpu,
        context=question.context,
        basis=basis,
    )
    # With a quorum, what another host derived is derived again, and changes as that does.
    return verdict, question.store.quorum() == 1
