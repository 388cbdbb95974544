"""What a client is asked, and what it says where no kernel is the answer."""

import os
from dataclasses import dataclass

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.reason import reason_for
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.payload import VerdictPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem, and how its kernel will be called."""

    problem: Problem
    context: ExecutionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuestion:
    """The problems of one layer, which differ in m, and what each may lose for shared weights."""

    problems: tuple[Problem, ...]
    context: ExecutionContext
    max_loss: float

    @property
    def alone(self) -> tuple[Question, ...]:
        """Return the question for each of the problems."""
        return tuple(Question(problem=one, context=self.context) for one in self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A verdict whose signature was checked, and the service's reasons for it."""

    verdict: VerdictPayload
    explain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFetched(NoKernel):
    """Why a kernel that a verdict names could not be had this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDownloaded(NotFetched):
    """Why the download of a kernel failed, which may pass."""


def ask(problem: Problem | str, threads: int, regime: Regime | str) -> Question:
    """Return the question for a problem or its text.

    Raises:
        InvalidInput: it, the threads or the regime cannot be used.
    """
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    asked.check_work(context.regime)
    return Question(problem=asked, context=context)


def callable_of(question: Question, found: Kernel | NoKernel) -> Kernel | FallbackKernel:
    """Return a kernel, or the library that computes where there is none."""
    return found if isinstance(found, Kernel) else fallback(question, found)


def fallback(question: Question, found: NoKernel) -> FallbackKernel:
    """Return the library that computes where there is no kernel."""
    return found.fallback(question.problem, threads=question.context.threads)


def reason_of(verdict: VerdictPayload) -> str:
    """Return why a verdict names a kernel, or none."""
    return reason_for(
        verdict.problem,
        verdict.cpu_key,
        ExecutionContext(threads=verdict.threads, regime=verdict.regime),
        decision=verdict.decision,
        basis=verdict.basis,
        comparison=verdict.comparison,
        is_served=verdict.artifact is not None,
    )


def is_set(variable: str) -> bool:
    """Return whether an environment variable switches something on."""
    return os.environ.get(variable, "").lower() not in {"", "0", "no", "false"}
