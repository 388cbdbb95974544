"""Decide which earlier trials still stand: those whose kernel would be made of the same now."""

from functools import lru_cache

from gemm_tuner.build.compile import compile_flags, has_flags_of_old
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render as render_kernel
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.domain.record import Trial
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.space.limits import check_covers
from gemm_tuner.tuning.generator import generator_version

_RENDERED = 8192


def stands(trial: Trial, toolchain: Toolchain) -> bool:
    """Return whether the kernel of a trial would have the same source, compiler, flags and ABI now.

    The same generator renders the same source. That of another is rendered, once in a process: 2 ms
    for each candidate. A record of old does not say which flags it had; nor, of a failure without a
    binary, which source, and then it does not stand.
    """
    recipe = trial.recipe
    if recipe is None or recipe.toolchain != toolchain.text:
        return False
    abi_version = trial.problem.operation.abi_version
    if trial.artifact is not None and trial.artifact.abi_version != abi_version:
        return False
    try:
        family = check_covers(trial.problem, trial.candidate)
    except InvalidCandidate:
        return False
    return _has_flags(recipe, trial.problem, family.isa, toolchain) and (
        trial.generator == generator_version()
        or recipe.source_sha256 == rendered_sha256(trial.problem, trial.candidate)
    )


@lru_cache(maxsize=_RENDERED)
def rendered_sha256(problem: Problem, candidate: Candidate) -> str:
    """Return the sha256 of the source of a candidate as it is rendered now."""
    return render_kernel(problem, candidate, check_covers(problem, candidate)).sha256


def _has_flags(
    recipe: Recipe, problem: Problem, isa: frozenset[IsaFeature], toolchain: Toolchain
) -> bool:
    if recipe.flags:
        return recipe.flags == compile_flags(isa, toolchain, keeps_roundings=problem.is_fixed)
    return has_flags_of_old()
