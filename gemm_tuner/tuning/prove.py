"""Prove one chosen candidate: no search, no timing."""

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.errors import CompilationInterrupted
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.limits import check_covers
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts, Render
from gemm_tuner.tuning.host import start_host
from gemm_tuner.tuning.settings import SweepSettings


def prove(
    problem: Problem,
    candidate: Candidate,
    *,
    cpu: Cpu,
    repository: Repository,
    toolchain: Toolchain,
    render: Render = render,
) -> Trial:
    """Return the trial of a candidate, which is in the repository when this returns.

    Features that `cpu` lacks are emulated if they can be; the trial says so.

    Raises:
        InvalidCandidate: the candidate's family does not compute the problem.
        NotEnoughMemory: the operands do not fit.
        CompilationInterrupted: the compiler was ended; nothing was tried.
    """
    check_covers(problem, candidate)
    space = Space(problem=problem, cpu=cpu, threads=1)
    with start_host(problem, space, SweepSettings(toolchain=toolchain)) as host:
        attempts = Attempts(
            problem=problem,
            cpu=cpu,
            host=host,
            repository=repository,
            toolchain=toolchain,
            render=render,
        )
        attempts.prove([candidate], ExecutionContext())
    trial = attempts.trial_of(candidate)
    if trial is None:
        raise CompilationInterrupted(f"{candidate.text} was not compiled; run it again.")
    return trial
