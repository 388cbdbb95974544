"""One whole trial: render, compile, prove, time, record. The only module that knows all of it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from threading import Event

from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.processes import time_in_processes
from gemm_tuner.build.compile import Build, compile_flags, compile_kernels
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.generator import generator_version

logger = logging.getLogger(__name__)

Render = Callable[[Problem, Candidate, MicroKernelFamily], Source]
Built = Build | CompilationFailed | CompilationInterrupted


def build_candidate(
    problem: Problem, candidate: Candidate, *, toolchain: Toolchain, render: Render
) -> Built:
    """Return the compiled candidate, or why it was not compiled."""
    [built] = compile_kernels([_source(problem, candidate, render)], toolchain=toolchain)
    return built


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Tries candidates for one problem and keeps each outcome the moment it is known.

    `stage` is what proofs are recorded as; where nothing will be timed, builds are kept at once.
    `render` makes the source of a candidate; tests put broken kernels in its place. `clock` says
    when a trial was.
    """

    problem: Problem
    cpu: Cpu
    host: TrialHost
    repository: Repository
    toolchain: Toolchain
    stage: Stage = Stage.RACE
    render: Render = render
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _known: set[str] = field(default_factory=set)
    _built: dict[Candidate, Built] = field(default_factory=dict)
    _proven: dict[Candidate, Build] = field(default_factory=dict)
    _proofs: dict[Candidate, Trial] = field(default_factory=dict)
    _failed: dict[Candidate, Trial] = field(default_factory=dict)

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Compile the new ones of some candidates, all together."""
        new = [one for one in candidates if not self._is_known(one)]
        sources = [_source(self.problem, candidate, self.render) for candidate in new]
        builds = compile_kernels(sources, toolchain=self.toolchain)
        self._built.update(zip(new, builds, strict=True))

    def prove(self, candidates: Sequence[Candidate], context: ExecutionContext) -> list[Candidate]:
        """Return the candidates that compile and compute the right result here, in their order.

        The host proves as many at once as it can. A candidate whose compiler was interrupted was
        not tried.
        """
        self.compile(candidates)
        new = [one for one in candidates if one in self._built]
        builds = [self._built.pop(one) for one in new]
        with ThreadPoolExecutor(max_workers=self.host.provers) as executor:
            findings = executor.map(self._verify, builds)
            for candidate, built, finding in zip(new, builds, findings, strict=True):
                self._conclude(candidate, context, built, finding)
        return [one for one in candidates if one in self._proven]

    def _is_known(self, candidate: Candidate) -> bool:
        return any(candidate in known for known in (self._built, self._proven, self._failed))

    def prove_together(
        self,
        builds: Mapping[Candidate, Future[Built]],
        context: ExecutionContext,
        *,
        executor: Executor,
        is_over: Callable[[], bool],
    ) -> Iterator[Trial]:
        """Yield the trial of each candidate when its proof ends: the host proves several at once.

        Its proof is recorded by then. Once one has ended and it `is_over`, which the threads of the
        executor ask, no more are begun. A candidate whose compiler was interrupted was not tried.
        """
        begun = set[Candidate]()
        has_ended = Event()

        def prove(candidate: Candidate) -> Finding | None:
            if has_ended.is_set() and is_over():
                return None
            begun.add(candidate)
            finding = self._verify(builds[candidate].result())
            has_ended.set()
            return finding

        proofs = {executor.submit(prove, candidate): candidate for candidate in builds}
        for proof in as_completed(proofs):
            candidate, finding = proofs[proof], proof.result()
            if candidate in begun:
                self._conclude(candidate, context, builds[candidate].result(), finding)
                if trial := self.trial_of(candidate):
                    yield trial

    def _verify(self, built: Built) -> Finding | None:
        """Return the finding of a proof, or None if there is nothing to prove or it was proved."""
        if not isinstance(built, Build) or built.artifact.sha256 in self._known:
            return None
        return self.host.verify(built)

    def _conclude(
        self,
        candidate: Candidate,
        context: ExecutionContext,
        built: Built,
        finding: Finding | None,
    ) -> None:
        """Record what came of a candidate; there is a finding if it was proved just now."""
        if isinstance(built, CompilationInterrupted):
            logger.info("%s: not tried: %s", candidate.text, built)
            return
        if isinstance(built, CompilationFailed):
            self._record_failure(
                candidate,
                context,
                Finding(outcome=Outcome.COMPILE_FAILED, detail=str(built)),
                None,
                refused=self._recipe(candidate),
            )
            return
        if finding is None:
            self._proven[candidate] = built
            return
        if finding.outcome is not Outcome.CORRECT:
            self._record_failure(candidate, context, finding, built)
            return
        trial = replace(self._trial(candidate, context, built), emulated=finding.emulated)
        if self.stage is Stage.PREDICTED:
            self._keep(built)
        self.repository.add_trial(trial)
        self._proofs[candidate] = trial
        self._proven[candidate] = built

    def time(
        self,
        candidates: Sequence[Candidate],
        context: ExecutionContext,
        *,
        stage: Stage,
        pairs: int,
        sample_ns: int,
        processes: int = 1,
        keeps_all: bool = False,
        on_process: Callable[[int], None] = lambda _process: None,
    ) -> list[Trial]:
        """Time proven candidates in the same rounds; return the recorded trials of those timed.

        Either all of them are kept or none. Beside each other and the baseline, those clearly
        slower than the fastest have few samples, unless the timing `keeps_all`; as these confirm
        nothing, such trials are of a final. All of this happens in each of some processes, and
        `on_process` is told which begins.
        """
        builds = [self._proven[candidate] for candidate in candidates]

        def time_in(process: int, timed: Sequence[Build]) -> tuple[TimedFinding, ...]:
            on_process(process)
            return self.host.time_together(
                timed,
                context=context,
                pairs=pairs,
                sample_ns=sample_ns,
                checks_large_ratios=stage is Stage.CONFIRM,
                process=process,
                keeps_all=keeps_all,
            )

        several = processes > 1
        timed = time_in_processes(builds, time_in, processes) if several else time_in(0, builds)
        trials = []
        rounds = max((_rounds_of(one) for one in timed), default=0)
        for candidate, build, one in zip(candidates, builds, timed, strict=True):
            if one.finding.outcome is not Outcome.CORRECT:
                self._record_failure(candidate, context, one.finding, build)
                continue
            if one.measurement is None:
                logger.info("%s: not timed: %s", candidate.text, one.finding.detail)
                continue
            trial = replace(
                self._trial(candidate, context, build),
                stage=Stage.FINAL if _is_dropout(one, stage, rounds) else stage,
                measurement=one.measurement,
                conditions=one.conditions,
            )
            self._keep(build)
            trials.append(trial)
        self.repository.add_trials(trials)
        return trials

    def trial_of(self, candidate: Candidate) -> Trial | None:
        """Return the trial in which a candidate failed or else was proved, if it was tried."""
        return self._failed.get(candidate) or self._proofs.get(candidate)

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Return the trials of the candidates that failed."""
        return tuple(self._failed.values())

    def recall(self, trials: Iterable[Trial]) -> None:
        """Prove nothing again that earlier sweeps on this CPU have proven or seen fail.

        What hung is tried again: the machine may have been too busy.
        """
        for trial in trials:
            if trial.outcome not in {Outcome.CORRECT, Outcome.HUNG}:
                self._failed[trial.candidate] = trial
            elif trial.outcome is Outcome.CORRECT and trial.artifact is not None:
                self._known.add(trial.artifact.sha256)

    def _keep(self, build: Build) -> None:
        self.repository.add_build(
            build.artifact, binary=build.binary, source_text=build.source.text
        )

    def _record_failure(
        self,
        candidate: Candidate,
        context: ExecutionContext,
        finding: Finding,
        build: Build | None,
        refused: Recipe | None = None,
    ) -> None:
        logger.info("%s: %s %s", candidate.text, finding.outcome.value, finding.detail)
        self._proven.pop(candidate, None)
        trial = replace(
            self._trial(candidate, context, build),
            outcome=finding.outcome,
            detail=finding.detail,
            emulated=finding.emulated,
            refused=refused,
        )
        self.repository.add_trial(trial)
        self._failed[candidate] = trial

    def _recipe(self, candidate: Candidate) -> Recipe:
        source, isa = _source(self.problem, candidate, self.render)
        return Recipe(
            source_sha256=source.sha256,
            toolchain=self.toolchain.text,
            flags=compile_flags(isa, self.toolchain, keeps_roundings=source.keeps_roundings),
        )

    def _trial(self, candidate: Candidate, context: ExecutionContext, build: Build | None) -> Trial:
        """Return a trial of a candidate of which nothing bad is known."""
        return Trial(
            created_at=self.clock(),
            problem=self.problem,
            cpu=self.cpu,
            context=context,
            candidate=candidate,
            toolchain=self.toolchain.text,
            generator=generator_version(),
            stage=self.stage,
            outcome=Outcome.CORRECT,
            artifact=build.artifact if build else None,
            usable_cpus=usable_cpus(),
        )


def _rounds_of(timed: TimedFinding) -> int:
    return len(timed.measurement.candidate.samples_ns) if timed.measurement else 0


def _is_dropout(timed: TimedFinding, stage: Stage, rounds: int) -> bool:
    """Return whether a build was to be confirmed, and left those that had so many rounds early."""
    return stage is Stage.CONFIRM and 2 * _rounds_of(timed) < rounds


def _source(
    problem: Problem, candidate: Candidate, render: Render
) -> tuple[Source, frozenset[IsaFeature]]:
    family = family_named(candidate.micro_kernel.family)
    return render(problem, candidate, family), family.isa
