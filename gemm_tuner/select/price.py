"""What a fixed order of additions costs: its kernel beside the best that adds in any order."""

from dataclasses import dataclass, replace

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Reduction
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The speed of a kernel over that of `candidate`, the best for the problem in any order.

    Both are speeds over `baseline`, beside which each was timed.
    """

    speed: float
    candidate: Candidate
    baseline: str

    @property
    def text(self) -> str:
        """Return a line for people."""
        return (
            f"price of the fixed order: {self.speed:.3f} times the speed of "
            f"{self.candidate.text}, the best kernel for any order, each timed beside "
            f"{self.baseline}"
        )


def price_of_fixed_order(repository: Repository, verdict: Verdict, cpu: Cpu) -> Price | None:
    """Return what the order of a verdict's kernel costs; None where that is not known.

    It is where both were measured on exactly this CPU, beside the same baseline.
    """
    own = verdict.measurement
    if own is None or not verdict.problem.is_fixed:
        return None
    problem = replace(verdict.problem, reduction=Reduction.ANY)
    other = choose(repository, problem, cpu=cpu, context=verdict.context).verdict
    theirs = other.measurement
    if theirs is None or other.candidate is None or theirs.baseline != own.baseline:
        return None
    return Price(
        speed=own.ratio.median / theirs.ratio.median,
        candidate=other.candidate,
        baseline=own.baseline,
    )
