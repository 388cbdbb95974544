"""Strategies compared on recordings."""

from collections.abc import Callable, Sequence
from functools import cache

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.replay.recording import Recording
from gemm_tuner.replay.replaying import Replay, Run
from gemm_tuner.replay.training import check_trainable, examples_of, train
from gemm_tuner.strategies.ranker import Ranker
from gemm_tuner.strategies.table import LEARNED, STRATEGIES, Plan


def compare(
    recordings: Sequence[Recording],
    names: Sequence[str],
    *,
    budget_s: float,
    seeds: Sequence[int],
    ranker: Ranker | None,
    report: Callable[[str, int, int], None],
) -> dict[str, list[list[Run]]]:
    """Return the searches of each strategy: for each recording, one of each seed.

    Without a `ranker`, the learned strategy has one for each problem, trained on all others: what
    it was trained on would tell nothing. `report` is told of each search.

    Raises:
        InvalidSetting: there is no such strategy, or too little to train on.
        MissingCapability: scikit-learn is needed and not installed.
    """
    for name in names:
        if name not in STRATEGIES:
            raise InvalidSetting(
                f"strategy {name!r} is not known; use one of {', '.join(STRATEGIES)}."
            )

    if LEARNED in names and ranker is None:
        check_trainable(recordings)

    @cache
    def trained_without(problem: str) -> Ranker:
        return train(examples_of([one for one in recordings if one.problem != problem]))

    found: dict[str, list[list[Run]]] = {name: [] for name in names}
    done, total = 0, len(recordings) * len(names) * len(seeds)
    for recording in recordings:
        replay = Replay(recording, budget_s=budget_s)
        for name in names:
            of_plan = ranker
            if name == LEARNED and ranker is None:
                of_plan = trained_without(recording.problem)
            runs = []
            for seed in seeds:
                runs.append(replay.run(Plan(name=name, seed=seed, ranker=of_plan)))
                done += 1
                report(name, done, total)
            found[name].append(runs)
    return found
