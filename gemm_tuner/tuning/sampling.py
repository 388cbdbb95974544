"""How carefully to time in each stage of a sweep, and how long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.record import Stage, Trial

FINALISTS = 8
FINALISTS_OF_SLOW_CALLS = 2
CONFIRMED = 3

# On a calm machine, calls of one thread hardly ever differ by as much from one timing to the next.
_DISTURBED = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How carefully to time: samples of each runner, and how long one takes at least.

    Where calls are slow there are fewer pairs, down to `fewest_pairs`, so that timing takes at most
    `share` of the budget for each candidate. All this happens in each of some `processes`.
    """

    stage: Stage
    pairs: int
    fewest_pairs: int
    sample_ns: int
    share: float
    processes: int = 1

    def with_samples(self, factor: int) -> "Sampling":
        """Return the sampling with so many times the samples and their share of the budget."""
        return replace(self, pairs=factor * self.pairs, share=factor * self.share)

    def affordable_pairs(self, candidates: int, *, call_s: float, budget_s: float) -> int:
        """Return how many samples of some candidates and of the baseline may be taken."""
        pairs = self._pairs_for_share(candidates, call_s, budget_s)
        return max(self.fewest_pairs, min(self.pairs, pairs))

    def is_affordable(self, candidates: int, *, call_s: float, budget_s: float) -> bool:
        """Return whether the fewest samples of some candidates take no more than their share."""
        return self._pairs_for_share(candidates, call_s, budget_s) >= self.fewest_pairs

    def duration_s(self, candidates: int, *, call_s: float, budget_s: float) -> float:
        """Return how long it takes at most to time some candidates together, in seconds.

        Before the samples, there is about one of each to find out how many calls it takes.
        """
        pairs = self.affordable_pairs(candidates, call_s=call_s, budget_s=budget_s)
        return self.processes * (1 + pairs) * self._round_s(candidates, call_s)

    def _pairs_for_share(self, candidates: int, call_s: float, budget_s: float) -> int:
        return int(self.share * candidates * budget_s / self._round_s(candidates, call_s))

    def _round_s(self, candidates: int, call_s: float) -> float:
        return (candidates + 1) * max(call_s, self.sample_ns / 1e9)


RACE = Sampling(stage=Stage.RACE, pairs=5, fewest_pairs=3, sample_ns=400_000, share=0.01)
FINAL = Sampling(stage=Stage.FINAL, pairs=31, fewest_pairs=5, sample_ns=2_000_000, share=0.015)
CONFIRM = Sampling(stage=Stage.CONFIRM, pairs=31, fewest_pairs=11, sample_ns=2_000_000, share=0.03)

# How long the threads of a call wait for each other differs from process to process, by up to a
# microsecond: more than 1 % of such a call. On one thread it is where memory comes to lie that
# differs, by 2 % and more of calls that wait for it. Of long calls, each process costs more than it
# tells.
_SHORT_CALL_S = 100e-6
_LONG_CALL_S = 5e-3
_PROCESSES, _PROCESSES_OF_SHORT_CALLS = 3, 6


def how_to_end(call_s: float) -> Sampling:
    """Return how finalists are timed of which a call takes so long."""
    return FINAL if call_s >= _LONG_CALL_S else _in_processes(FINAL, _PROCESSES)


def how_to_compare(call_s: float) -> Sampling:
    """Return how kernels of a range are compared at an m at which a call takes so long.

    A range has few kernels, and each has to be the right one for many m: where calls are short,
    and weights come from a cache that is shared, more processes take part than in a final.
    """
    is_short = call_s < _SHORT_CALL_S
    return _in_processes(FINAL, _PROCESSES_OF_SHORT_CALLS) if is_short else how_to_end(call_s)


def how_to_confirm(call_s: float, threads: int) -> Sampling:
    """Return how a kernel is confirmed of which a call takes so long."""
    if call_s >= _LONG_CALL_S:
        return CONFIRM
    is_short = threads > 1 and call_s < _SHORT_CALL_S
    return _in_processes(CONFIRM, _PROCESSES_OF_SHORT_CALLS if is_short else _PROCESSES)


def _in_processes(sampling: Sampling, processes: int) -> Sampling:
    """Return a third of the samples, and of the least, in each of some processes."""
    return replace(
        sampling,
        pairs=ceil(sampling.pairs / _PROCESSES),
        fewest_pairs=ceil(sampling.fewest_pairs / _PROCESSES),
        share=sampling.share / _PROCESSES,
        processes=processes,
    )


def most_finalists(*, call_s: float, budget_s: float) -> int:
    """Return how many candidates are in a final at most: fewer where calls are slow.

    Of several threads, one comes on top that needs only one.
    """
    is_affordable = FINAL.is_affordable(FINALISTS, call_s=call_s, budget_s=budget_s)
    return FINALISTS if is_affordable else FINALISTS_OF_SLOW_CALLS


def are_confirmed_at_once(count: int, *, call_s: float, threads: int) -> bool:
    """Return whether some candidates that no search follows are confirmed in their final.

    Long calls have fewer rounds in a final than in a confirmation.
    """
    return threads == 1 and 1 < count <= CONFIRMED and call_s < _LONG_CALL_S


def confirming_s(
    call_s: float, budget_s: float, *, threads: int, finalists: int, confirmed: int = 1
) -> float:
    """Return how long the final takes at most and to confirm some of the finalists, in seconds.

    A single finalist needs no final.
    """
    final = how_to_end(call_s)
    final_s = final.duration_s(finalists, call_s=call_s, budget_s=budget_s) if finalists > 1 else 0
    confirm = how_to_confirm(call_s, threads)
    return final_s + confirmed * confirm.duration_s(1, call_s=call_s, budget_s=budget_s)


def is_slower_than_before(trials: Sequence[Trial], earlier: Sequence[Trial]) -> bool:
    """Return whether a kernel or the baseline took much longer than in an earlier trial.

    Either counts: to look at kernels alone would favour them.
    """
    least_ns = _least_ns(earlier)
    return any(
        call_ns > _DISTURBED * least_ns.get(runner, inf)
        for runner, call_ns in _least_ns(trials).items()
    )


def _least_ns(trials: Sequence[Trial]) -> dict[Candidate | str, float]:
    """Return the least median time of each candidate and baseline, in ns."""
    least: dict[Candidate | str, float] = {}
    for trial in trials:
        if (timed := trial.measurement) is not None:
            ours, theirs = timed.candidate.median_ns, timed.baseline_timing.median_ns
            least[trial.candidate] = min(ours, least.get(trial.candidate, inf))
            least[timed.baseline] = min(theirs, least.get(timed.baseline, inf))
    return least
