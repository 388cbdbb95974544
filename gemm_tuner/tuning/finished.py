"""Sweeps that came to their end: what they found is the answer, and nothing is timed again."""

from collections.abc import Sequence

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.select.derive import standing_trials
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials, relevant_trials
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.result import SweepResult, make_result
from gemm_tuner.tuning.settings import SweepSettings


def recall_finished(
    space: Space,
    contexts: Sequence[ExecutionContext],
    repository: Repository,
    settings: SweepSettings,
    *,
    baseline: str,
) -> dict[ExecutionContext, SweepResult]:
    """Return the results of those contexts whose sweep beside `baseline` came to its end.

    That is a sweep by this generator whose search was exhausted, or that had as large a budget, and
    whose trials stand. The baseline is a name, which stands for each version, or a name and a
    version.
    """
    found = {
        context: _recall(space, context, repository, settings, baseline) for context in contexts
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
    )
    for end in ends:
        is_as_long = end.is_exhausted or end.budget_s >= settings.budget_s
        if not (is_as_long and end.baseline.startswith(baseline)):
            continue
        earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
        trials = relevant_trials(earlier, space, context, end.baseline)
        is_known = standing_trials(trials) if space.like else trials
        if is_known:
            return make_result(
                problem, cpu, context, trials, complete=end.is_exhausted, resumed=True
            )
    return None
