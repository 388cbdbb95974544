"""How carefully to time in each stage of a sweep, and how long that takes."""

from dataclasses import dataclass

from gemm_tuner.domain.record import Stage

FINALISTS = 4
CONFIRMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """How carefully to time: samples of each callee, and how long one takes at least.

    Where calls are slow there are fewer pairs, down to `fewest_pairs`, so that timing takes at most
    `share` of the budget for each candidate.
    """

    stage: Stage
    pairs: int
    fewest_pairs: int
    sample_ns: int
    share: float

    def affordable_pairs(self, candidates: int, *, call_s: float, budget_s: float) -> int:
        """Return how many samples of some candidates and of the baseline may be taken."""
        affordable_s = self.share * candidates * budget_s
        pairs = int(affordable_s / self._round_s(candidates, call_s))
        return max(self.fewest_pairs, min(self.pairs, pairs))

    def duration_s(self, candidates: int, *, call_s: float, budget_s: float) -> float:
        """Return how long it takes at most to time some candidates together, in seconds."""
        pairs = self.affordable_pairs(candidates, call_s=call_s, budget_s=budget_s)
        return pairs * self._round_s(candidates, call_s)

    def _round_s(self, candidates: int, call_s: float) -> float:
        return (candidates + 1) * max(call_s, self.sample_ns / 1e9)


RACE = Care(stage=Stage.RACE, pairs=5, fewest_pairs=3, sample_ns=400_000, share=0.01)
FINAL = Care(stage=Stage.FINAL, pairs=15, fewest_pairs=5, sample_ns=2_000_000, share=0.03)
CONFIRM = Care(stage=Stage.CONFIRM, pairs=21, fewest_pairs=11, sample_ns=2_000_000, share=0.05)


def most_finalists(threads: int) -> int:
    """Return how many candidates are in a final at most: of several threads, one needs only one."""
    return FINALISTS if threads == 1 else FINALISTS + 1


def confirming_s(call_s: float, budget_s: float, *, finalists: int, confirmed: int = 1) -> float:
    """Return how long the final takes at most and to confirm some of the finalists, in seconds.

    A single finalist needs no final.
    """
    final_s = FINAL.duration_s(finalists, call_s=call_s, budget_s=budget_s) if finalists > 1 else 0
    return final_s + confirmed * CONFIRM.duration_s(1, call_s=call_s, budget_s=budget_s)
