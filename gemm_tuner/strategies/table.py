"""The strategies by name: a row for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.chosen import Chosen
from gemm_tuner.strategies.exhaustive import Exhaustive
from gemm_tuner.strategies.halving import SuccessiveHalving
from gemm_tuner.strategies.learned_search import LearnedSearch
from gemm_tuner.strategies.local_search import LocalSearch
from gemm_tuner.strategies.random_search import RandomSearch
from gemm_tuner.strategies.ranker import Ranker
from gemm_tuner.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which strategy to search with: its name, the seed of what it draws, and its ranker."""

    name: str = "local"
    seed: int = 0
    ranker: Ranker | None = None

    def __post_init__(self) -> None:
        """Check that there is such a strategy, and a ranker for one that needs it.

        Raises:
            InvalidSetting: there is not.
        """
        if self.name not in STRATEGIES:
            raise InvalidSetting(
                f"strategy {self.name!r} is not known; use one of {', '.join(STRATEGIES)}."
            )
        if self.name == LEARNED and self.ranker is None:
            raise InvalidSetting(f"strategy {self.name!r} needs a ranker; name one with --ranker.")

    @property
    def is_default(self) -> bool:
        """Say whether this is how a sweep searches if nothing else is asked for."""
        return self.name == DEFAULT


Make = Callable[[Space, Plan, Sequence[Candidate], Sequence[Candidate]], Strategy]


def _learned(
    space: Space, plan: Plan, seeds: Sequence[Candidate], elsewhere: Sequence[Candidate]
) -> Strategy:
    assert plan.ranker is not None
    return LearnedSearch(space, ranker=plan.ranker, seeds=[*seeds, *elsewhere])


DEFAULT, LEARNED = "local", "learned"
STRATEGIES: Mapping[str, Make] = {
    DEFAULT: lambda space, _plan, seeds, elsewhere: LocalSearch(
        space, seeds=seeds, elsewhere=elsewhere
    ),
    "exhaustive": lambda space, _plan, seeds, elsewhere: Exhaustive(
        space, seeds=[*seeds, *elsewhere]
    ),
    "random": lambda space, plan, seeds, elsewhere: RandomSearch(
        space, seed=plan.seed, seeds=[*seeds, *elsewhere]
    ),
    "halving": lambda space, plan, seeds, elsewhere: SuccessiveHalving(
        space, seed=plan.seed, seeds=[*seeds, *elsewhere]
    ),
    LEARNED: _learned,
}


def make_strategy(
    space: Space,
    plan: Plan,
    *,
    seeds: Sequence[Candidate] = (),
    elsewhere: Sequence[Candidate] = (),
    chosen: Sequence[Candidate] = (),
) -> Strategy:
    """Return a search of the space, or, where candidates were chosen, these and no search.

    `seeds` are tried first. What is good `elsewhere`, in another regime, comes early.
    """
    return Chosen(chosen) if chosen else STRATEGIES[plan.name](space, plan, seeds, elsewhere)
