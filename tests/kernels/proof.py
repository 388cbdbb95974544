"""Compile candidates and put each through the full proof, many problems in one process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import TypeVar

from grids import toolchain_as_served
from other_encoding import spelled_for_this_cpu

from gemm_tuner.bench.correctness import Case, verify
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import build_driver, build_fixed_order
from gemm_tuner.bench.emulator import load_for_proof, plan_emulation
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.forked import Death, run_in_child
from gemm_tuner.bench.inputs import InputKind
from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

SEED = 20_260

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A problem and the candidate that should compute it, in their text forms."""

    problem: str
    candidate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A problem with the kernel to prove, or why there is none, and what the proof needs."""

    problem: Problem
    build: Build | CompilationFailed | CompilationInterrupted
    cases: dict[InputKind, Case]


Needs = tuple[Source, frozenset[IsaFeature]]


def prove_all(
    subjects: Iterable[Subject],
    toolchain: Toolchain,
    respell: Callable[[Source, frozenset[IsaFeature]], Needs] = spelled_for_this_cpu,
) -> dict[Subject, Finding]:
    """Return what the proof finds for each subject that is not correct.

    Features that this CPU lacks are emulated. `respell` writes the source that is proved, and says
    what it needs.
    """
    asked = tuple(subjects)
    sources = []
    for subject in asked:
        candidate = Candidate.parse(subject.candidate)
        family = family_named(candidate.micro_kernel.family)
        source = render(Problem.parse(subject.problem), candidate, family)
        sources.append(respell(source, family.isa))
    drivers = toolchain_as_served(toolchain)
    report = Report(build_driver("crash", drivers))
    cases: dict[str, dict[InputKind, Case]] = {}
    trials = []
    for subject, build in zip(asked, compile_kernels(sources, toolchain=toolchain), strict=True):
        problem = Problem.parse(subject.problem)
        if subject.problem not in cases:
            fixed_order = build_fixed_order(drivers) if problem.is_fixed else None
            cases[subject.problem] = {
                kind: Case(problem, kind, SEED, fixed_order=fixed_order) for kind in InputKind
            }
        trials.append(_Trial(problem=problem, build=build, cases=cases[subject.problem]))
    findings = _prove_together(trials, report)
    if findings is None:
        findings = [_prove(trial, report, toolchain) for trial in trials]
    return {
        subject: finding
        for subject, finding in zip(asked, findings, strict=True)
        if finding.outcome is not Outcome.CORRECT
    }


def _prove_together(trials: Sequence[_Trial], report: Report) -> list[Finding] | None:
    """Return the findings of one child for all, or None if each needs a child of its own.

    It does where one was not compiled, is emulated or ended the child.
    """
    cpu = detect_cpu()
    kernels = [(trial, trial.build) for trial in trials if isinstance(trial.build, Build)]
    if len(kernels) < len(trials):
        return None
    if any(build.artifact.required_isa - cpu.isa for _trial, build in kernels):
        return None

    def task() -> list[Finding]:
        findings = []
        for trial, build in kernels:
            kernel = load_kernel(build.binary, artifact=build.artifact, cpu=cpu)
            findings.append(verify(kernel, trial.problem, trial.cases, report))
        return findings

    result = _run(task, report)
    return None if isinstance(result, Death) else result


def _prove(trial: _Trial, report: Report, toolchain: Toolchain) -> Finding:
    if not isinstance(trial.build, Build):
        return Finding(outcome=Outcome.COMPILE_FAILED, detail=str(trial.build))

    result = run_kernel(
        trial.build,
        lambda kernel: verify(kernel, trial.problem, trial.cases, report),
        report,
        toolchain,
    )
    if isinstance(result, Death):
        return Finding(outcome=result.outcome, detail=result.detail)
    return result


def run_kernel(
    build: Build, use: Callable[[Kernel], Result], report: Report, toolchain: Toolchain
) -> Result | Death:
    """Return what `use` makes of a kernel in a child, or how the child died.

    Features that this CPU lacks are emulated.
    """
    cpu = detect_cpu()
    emulation = plan_emulation(build.artifact.required_isa, cpu=cpu, toolchain=toolchain)

    def task() -> Result:
        return use(load_for_proof(build, cpu=cpu, emulation=emulation, report=report))

    return _run(task, report)


def _run(task: Callable[[], Result], report: Report) -> Result | Death:
    ours, theirs = Pipe()
    with ours, theirs:
        return run_in_child(task, report=report, stall_timeout_s=20.0, owner=ours)
