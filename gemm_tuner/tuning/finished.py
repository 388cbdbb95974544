"""Finished sweeps: their results are the answer, and nothing is timed again."""

from collections.abc import Mapping
from dataclasses import replace

from gemm_tuner.derive import standing_trials
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.verdict import Decision, Verdict
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials, relevant_trials
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.result import Recalled, SweepResult, make_result
from gemm_tuner.tuning.settings import SweepSettings

_WIDE = 0.05  # of a ratio, to each side


def recall_finished(
    space: Space,
    baselines: Mapping[ExecutionContext, str | None],
    repository: Repository,
    settings: SweepSettings,
) -> dict[ExecutionContext, SweepResult]:
    """Return the results of those contexts whose sweep beside its baseline came to its end.

    That is a sweep by this generator whose search was exhausted, or that had as large a budget, and
    whose trials stand, unless what it found is not settled or is to be measured `again`, or another
    strategy is asked for. A search in one format of packed weights has an end of its own. The
    `baselines` are, by context, a name, which stands for each version, or a name and a version;
    None is not known yet.
    """
    if settings.again or not settings.plan.is_default:
        return {}
    found = {
        context: _recall(space, context, repository, settings, baseline)
        for context, baseline in baselines.items()
        if baseline is not None
    }
    return {context: result for context, result in found.items() if result is not None}


def _recall(
    space: Space,
    context: ExecutionContext,
    repository: Repository,
    settings: SweepSettings,
    baseline: str,
) -> SweepResult | None:
    problem, cpu = space.problem, space.cpu
    ends = repository.sweep_ends(
        problem,
        cpu.exact_key,
        context,
        toolchain=settings.toolchain.text,
        generator=generator_version(),
        packed_format=space.packed_format,
    )
    for end in ends:
        is_as_long = end.is_exhausted or end.budget_s >= settings.budget_s
        if not (is_as_long and _is_of(end.baseline, baseline)):
            continue
        earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
        trials = relevant_trials(earlier, space, context, end.baseline)
        is_known = standing_trials(trials) if space.like else trials
        if not is_known:
            continue
        result = make_result(problem, cpu, context, trials, complete=end.is_exhausted, resumed=True)
        if is_settled(result.verdict):
            last = max(trial.created_at for trial in trials)
            return replace(result, recalled=Recalled(on=last.date(), end=end))
    return None


def _is_of(text: str, baseline: str) -> bool:
    """Return whether a name and a version are of a baseline, or of any version of it."""
    return text == baseline or text.startswith(f"{baseline} ")


def is_settled(verdict: Verdict) -> bool:
    """Return whether a verdict would come out the same if it were measured once more.

    A tie, or a faster baseline, is not settled by a wide interval, nor where the fastest samples
    speak clearly for something else. What there is reason to doubt settles nothing.
    """
    if verdict.doubt is not None:
        return False
    if verdict.measurement is None or verdict.decision is Decision.TUNED:
        return True
    return all(map(_is_sure, verdict.measurement.process_ratios))


def _is_sure(ratio: Ratio) -> bool:
    """Say whether a ratio in one process is known well; it may be another in the next."""
    is_narrow = ratio.high - ratio.low <= 2 * _WIDE * ratio.median
    lowest, highest = (1 - _WIDE) * ratio.low, (1 + _WIDE) * ratio.high
    return is_narrow and lowest <= ratio.of_minimums <= highest
