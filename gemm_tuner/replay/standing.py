"""Decide which recordings still stand: those whose kernels would be made of the same now."""

from collections.abc import Sequence

from gemm_tuner.build.compile import compile_flags
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.replay.recording import Recording
from gemm_tuner.space.limits import check_covers
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.standing import rendered_sha256


def recipes_digest(problem: Problem, candidates: Sequence[Candidate], toolchain: Toolchain) -> str:
    """Return the sha256 of what kernels are made of now: sources, compiler, flags and ABI.

    Raises:
        InvalidCandidate: there is no such kernel now.
    """
    recipes = [
        (
            rendered_sha256(problem, one),
            compile_flags(
                check_covers(problem, one).isa, toolchain, keeps_roundings=problem.is_fixed
            ),
        )
        for one in candidates
    ]
    return identity([toolchain.text, problem.operation.abi_version, recipes])


def stands(recording: Recording, toolchain: Toolchain) -> bool:
    """Return whether the kernels of a recording would be made of the same now, as a trial's.

    Sources are rendered only where the generator is another one: 2 ms for each candidate.
    """
    if recording.toolchain != toolchain.text:
        return False
    if recording.generator == generator_version():
        return True
    candidates = [one.candidate for one in recording.candidates]
    try:
        now = recipes_digest(Problem.parse(recording.problem), candidates, toolchain)
    except InvalidCandidate:
        return False
    return recording.recipes == now
