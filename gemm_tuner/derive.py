"""Derive a verdict from trials.

This is the only place where it is done: when trials are added, when the store is asked, and at the
end of a sweep.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.quorum import Combined, Finding, combine
from gemm_tuner.domain.record import AttestedTrial, Outcome, Stage, Trial
from gemm_tuner.domain.verdict import (
    Basis,
    Decision,
    HostFigure,
    Verdict,
    decide,
    is_faster_whatever_threads_wait,
)
from gemm_tuner.errors import InvalidRecord

# To be raised when other verdicts follow from the same trials, or they are stored in another form:
# then all are derived again.
RULES = 7
# The share of the speed of a kernel for the greatest m alone that several for a range have there.
LEAST_OF_RANGE = 0.9
_ABOUT_AS_FAST = 0.98
SCALAR = "scalar"  # how the name begins of the baseline for want of a library

# A sweep that came to the end of its search: CPU, context, toolchain, generator and baseline.
SweepKey = tuple[str, ExecutionContext, str, str, str]


def runnable_trials(
    trials: Iterable[Trial], context: ExecutionContext, isa: frozenset[IsaFeature]
) -> tuple[Trial, ...]:
    """Return the standing trials in `context` of kernels that need no more features than `isa`.

    `trials` are of one problem, in every stage and context: a failure in any of them speaks
    against a kernel.
    """
    return tuple(
        trial
        for trial in standing_trials(trials)
        if trial.context == context and trial.artifact and trial.artifact.required_isa <= isa
    )


def derive_servable(
    runnable: Sequence[Trial],
    *,
    problem: Problem,
    cpu_key: str,
    basis: Basis,
    held: Collection[str],
    exhausted: Collection[SweepKey],
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return the verdict from the newest generator that gives one, of `runnable` trials.

    With it come the confirmed trials, of this generator, of kernels that could be served. A verdict
    whose measurement gives reason to doubt is returned where there is no other.

    Trials beside different baselines are not compared: the newest count. Only kernels are named
    whose binaries are in the store, as `held` says. `exhausted` are the sweeps of the problem that
    came to the end of their search.
    """
    doubted: Verdict | None = None
    for group in dict.fromkeys(_group(trial) for trial in reversed(runnable)):
        of_group = [trial for trial in runnable if _group(trial) == group]
        in_store = [t for t in of_group if t.artifact and t.artifact.sha256 in held]
        counting = in_store or of_group
        verdict = derive_verdict(
            counting,
            problem=problem,
            cpu_key=cpu_key,
            context=counting[-1].context,
            complete=_sweep_key(counting[-1]) in exhausted,
            basis=basis,
        )
        if verdict.doubt is not None:
            doubted = doubted or verdict
        elif verdict.artifact is None or verdict.artifact.sha256 in held:
            return verdict, tuple(trial for trial in in_store if is_believed(trial))
    return doubted, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What trials are to answer: a problem on a CPU in a context, and what is known beside them.

    `held` are the binaries that may be served, and `exhausted` the sweeps of the problem that came
    to the end of their search.
    """

    problem: Problem
    cpu_key: str
    context: ExecutionContext
    isa: frozenset[IsaFeature]
    basis: Basis
    held: Collection[str]
    exhausted: Collection[SweepKey]


def derive_for_hosts(
    own: Sequence[AttestedTrial], others: Sequence[AttestedTrial], asked: Asked, *, quorum: int
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return the verdict that trials allow, as `derive_servable` does, and what each host found.

    `own` are the trials that the verdict rests on, and `others` those on other CPUs of the class,
    which count towards a quorum above 1. A kernel is then named only if so many hosts would each
    serve it by what they measured themselves, one of them in `own`; it has the least speed that one
    of these measured.
    """
    verdict, confirmed = _servable(own, asked)
    if verdict is None:
        return None, ()
    verdict = replace(verdict, quorum=quorum)
    if verdict.doubt is not None:
        return verdict, ()
    here = _by_host(own, asked)
    elsewhere = _by_host(others, asked) if quorum > 1 else {}
    findings = {key: _finding(key, trials) for key, trials in (elsewhere | here).items()}
    combined = combine(findings.values(), quorum)
    if quorum > 1:
        verdict = replace(verdict, hosts=_figures(findings, combined))
        return _agreed(verdict, [one for each in here.values() for one in each], combined)
    if len(findings) > 1:  # the newest of each kernel counts, whoever measured it
        of = Combined(kernel=_sha256(verdict), decision=None) if verdict.artifact else combined
        verdict = replace(verdict, hosts=_figures(findings, of))
    return verdict, confirmed


def _agreed(
    verdict: Verdict, here: Iterable[Trial], combined: Combined | None
) -> tuple[Verdict, tuple[Trial, ...]]:
    """Return a verdict with what enough hosts found, one of them `here`, or else no kernel.

    Of those who found it, it tells the least speed, and of those who do not agree as well.
    """
    of_kernel = [
        (trial, trial.measurement)
        for trial in here
        if combined and trial.measurement and _supports(trial, combined)
    ]
    if not of_kernel:
        return replace(verdict, decision=_no_claim(verdict.decision), artifact=None), ()
    least, measurement = min(of_kernel, key=lambda one: one[1].ratio.median)
    agreed = combined.decision if combined else None
    verdict = replace(
        verdict,
        decision=agreed or _no_claim(decide_by(least)),
        candidate=least.candidate,
        artifact=least.artifact if agreed else None,
        measurement=Evidence.of(measurement),
        generator=least.generator,
        tried_at=least.created_at,
    )
    return verdict, (least,) if agreed else ()


def _no_claim(decision: Decision) -> Decision:
    return Decision.TIE if decision is Decision.TUNED else decision


def split_by_cpu(
    decisive: Sequence[AttestedTrial], cpu_key: str, *, of_class: bool = False
) -> tuple[list[AttestedTrial], list[AttestedTrial]]:
    """Return the trials that a verdict for a CPU rests on, and the others of its class.

    To the first, what failed on other CPUs belongs too if it is to be a verdict `of_class`. To the
    others it always does.
    """
    own, others = list[AttestedTrial](), list[AttestedTrial]()
    for one in decisive:
        is_here, is_failure = (
            one.trial.cpu.exact_key == cpu_key,
            one.trial.outcome is not Outcome.CORRECT,
        )
        if is_here or (of_class and is_failure):
            own.append(one)
        if not is_here or is_failure:
            others.append(one)
    return own, others


def _servable(
    attested: Sequence[AttestedTrial], asked: Asked
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    return derive_servable(
        runnable_trials([one.trial for one in attested], asked.context, asked.isa),
        problem=asked.problem,
        cpu_key=asked.cpu_key,
        basis=asked.basis,
        held=asked.held,
        exhausted=asked.exhausted,
    )


def _by_host(attested: Sequence[AttestedTrial], asked: Asked) -> dict[str, tuple[Trial, ...]]:
    """Return what each host confirmed that could be served, by its key; failures are everyone's."""
    found: dict[str, tuple[Trial, ...]] = {}
    for key in {one.key for one in attested if one.key and is_believed(one.trial)}:
        counts = [
            one for one in attested if one.key == key or one.trial.outcome is not Outcome.CORRECT
        ]
        _verdict, confirmed = _servable(counts, asked)
        if confirmed:
            found[key] = confirmed
    return found


def _finding(key: str, trials: Sequence[Trial]) -> Finding:
    figures = {
        _sha256(one): _figure(key, one, one.measurement) for one in trials if one.measurement
    }
    best, _measurement = _fastest([(one, one.measurement) for one in trials if one.measurement])
    return Finding(figures=figures, best=figures[_sha256(best)])


def _figure(key: str, trial: Trial, measurement: Measurement) -> HostFigure:
    return HostFigure(
        key=key,
        kernel=_sha256(trial),
        candidate=trial.candidate.text,
        decision=decide_by(trial),
        would_serve=is_servable(trial),
        ratio=measurement.ratio,
        baseline=measurement.baseline,
    )


def _figures(findings: Mapping[str, Finding], combined: Combined | None) -> tuple[HostFigure, ...]:
    kernel = combined.kernel if combined else ""
    return tuple(findings[key].of(kernel) for key in sorted(findings))


def _supports(trial: Trial, combined: Combined) -> bool:
    """Return whether what is decided of a kernel, if anything is, follows from a trial alone."""
    if _sha256(trial) != combined.kernel or trial.measurement is None:
        return False
    if combined.decision is Decision.TUNED:
        return decide_by(trial) is Decision.TUNED
    return combined.decision is None or is_servable(trial)


def _sha256(named: Trial | Verdict) -> str:
    return named.artifact.sha256 if named.artifact else ""


def _group(trial: Trial) -> tuple[str, str]:
    """Return the key that comparable trials share: the generator and the baseline."""
    return trial.generator, trial.measurement.baseline if trial.measurement else ""


def _sweep_key(trial: Trial) -> SweepKey:
    generator, baseline = _group(trial)
    return trial.cpu.exact_key, trial.context, trial.toolchain, generator, baseline


def derive_verdict(
    trials: Sequence[Trial],
    *,
    problem: Problem,
    cpu_key: str,
    context: ExecutionContext,
    complete: bool,
    basis: Basis = Basis.MEASURED,
) -> Verdict:
    """Return the verdict that `trials`, all of one generator and beside one baseline, allow.

    Beside the scalar baseline there is nothing faster to claim: at best a tie.

    Of the candidates confirmed in `context`, also in different rounds, the fastest by what can be
    compared between them stands against its own paired baseline. A verdict keeps the measurement
    that it rests on, but names no artifact unless that shows it to be as fast as what would run
    instead. What gives reason to doubt is no evidence: alone, it gives a tie that is not complete.
    """
    confirmed = [
        (trial, trial.measurement)
        for trial in standing_trials(trials)
        if trial.context == context and trial.measurement is not None
    ]
    if not confirmed:
        return no_verdict(problem, cpu_key=cpu_key, context=context)

    believed = [one for one in confirmed if why_doubted(one[1]) is None]
    best, measurement = _fastest(believed or confirmed)
    return Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=decide_by(best),
        basis=basis,
        complete=complete and bool(believed),
        candidate=best.candidate,
        artifact=best.artifact if believed and is_servable(best) else None,
        measurement=Evidence.of(measurement),
        generator=best.generator,
        tried_at=best.created_at,
    )


def is_servable(trial: Trial) -> bool:
    """Return whether a timed kernel is as fast as the library that would run in its place, if any.

    Raises:
        InvalidRecord: nothing was measured.
    """
    measurement = trial.measurement
    if measurement is None:
        raise InvalidRecord("a trial without a measurement says nothing of speed.")
    return Comparison.of(
        measurement.ratio,
        measurement.baseline,
        measurement.raced,
        is_fixed=trial.problem.is_fixed,
    ).is_servable


def decide_by(trial: Trial) -> Decision:
    """Return what a measured trial decides; to be faster than our own scalar loop is no claim.

    Nothing is decided by what gives reason to doubt, or by less than the threads of a call may wait
    for each other another time. Raises `InvalidRecord` if nothing was measured.
    """
    measurement = trial.measurement
    if measurement is None:
        raise InvalidRecord("a trial without a measurement decides nothing.")
    if why_doubted(measurement) is not None:
        return Decision.TIE
    decision = decide(measurement.ratio)
    is_claim = not measurement.baseline.startswith(SCALAR) and is_faster_whatever_threads_wait(
        trial.candidate.threads_used(trial.context.threads),
        kernel_ns=measurement.candidate.median_ns,
        baseline_ns=measurement.baseline_timing.median_ns,
    )
    return decision if is_claim or decision is not Decision.TUNED else Decision.TIE


def standing_trials(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the latest confirming trial of each build and context, in the order of `trials`.

    A build that failed after it was confirmed, in whatever stage or context, has none. What gives
    reason to doubt stands only where there is nothing else; what was timed with more threads than
    there were CPUs does not stand.
    """
    standing: dict[tuple[Candidate, str, ExecutionContext], Trial] = {}
    for trial in trials:
        if trial.artifact is None:
            continue
        build = (trial.candidate, trial.artifact.sha256)
        if trial.outcome is not Outcome.CORRECT:
            standing = {key: kept for key, kept in standing.items() if key[:2] != build}
        elif (
            trial.stage is Stage.CONFIRM and trial.measurement is not None and trial.had_its_threads
        ):
            key = (*build, trial.context)
            if is_believed(trial) or not (key in standing and is_believed(standing[key])):
                standing.pop(key, None)
                standing[key] = trial
    return tuple(standing.values())


def is_believed(trial: Trial) -> bool:
    """Return whether a trial has a measurement that gives no reason to doubt."""
    return trial.measurement is not None and why_doubted(trial.measurement) is None


def tells_speed(trial: Trial) -> bool:
    """Return whether a trial says how fast its kernel is: right, believed, on CPUs of its own.

    A library for a range that was timed at one m is no kernel of that m.
    """
    return (
        trial.outcome is Outcome.CORRECT
        and trial.had_its_threads
        and is_believed(trial)
        and not (trial.candidate.below and trial.problem.m.exact is not None)
    )


def no_verdict(problem: Problem, *, cpu_key: str, context: ExecutionContext) -> Verdict:
    """Return the verdict when nothing is known: the baseline."""
    return Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=Decision.BASELINE,
        basis=Basis.NONE,
        complete=False,
    )


def _fastest(timed: Sequence[tuple[Trial, Measurement]]) -> tuple[Trial, Measurement]:
    """Return the fastest; of those that are about as fast, one that may be served, if any.

    Rounds of their own compare kernels within 2 percent, and each more exactly with its baseline.
    Of a range, several kernels count before one for the greatest m alone. That one is tuned where
    it is timed, and may be slow for any other m. Several that are slower by more than a tenth there
    were put together badly.
    """
    enough = LEAST_OF_RANGE * max(measurement.comparable_speed for _trial, measurement in timed)
    several = [one for one in timed if one[0].candidate.below and one[1].comparable_speed >= enough]
    counted = several or timed
    enough = _ABOUT_AS_FAST * max(measurement.comparable_speed for _trial, measurement in counted)
    return min(
        (one for one in counted if one[1].comparable_speed >= enough),
        key=lambda one: (
            not is_servable(one[0]),
            -one[1].comparable_speed,
            _simplicity(one[0].candidate),
        ),
    )


def _simplicity(candidate: Candidate) -> tuple[int, str]:
    return (candidate.complexity, candidate.text)
