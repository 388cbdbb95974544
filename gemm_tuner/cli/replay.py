"""`gemm-tuner replay`: compare strategies of a search on recorded trials, without the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.domain.units import counted, duration_text
from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.replay.comparison import compare
from gemm_tuner.replay.figures import TIMES_S, Figures, figures_of
from gemm_tuner.replay.leaving import leaving
from gemm_tuner.replay.recording import Recording, read_recordings, recording_path
from gemm_tuner.replay.replaying import Run, is_near_best
from gemm_tuner.replay.samples import Samples
from gemm_tuner.replay.training import check_trainable
from gemm_tuner.strategies.ranker import read_ranker
from gemm_tuner.strategies.table import LEARNED, STRATEGIES

_MOST_REPEATS = 1000
_HEADERS = (
    *("strategy", ">near best, median", ">90th percentile"),
    *(f">lost at {time_s:g} s" for time_s in TIMES_S),
    *(">tried", ">wrong winners"),
)


def replay(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="What was recorded; by default that of this CPU"),
    ] = None,
    *,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help=f"One of {', '.join(STRATEGIES)}; may be given several times; by default all",
        ),
    ] = None,
    budget: options.Budget = "30s",
    repeats: Annotated[
        int, typer.Option("--repeats", help="Searches of each problem, each with other samples")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all random draws")] = 0,
    ranker: options.RankerFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare strategies of a search on recorded trials, without the machine.

    The ranker of "learned" is trained for each problem on all others, unless --ranker names one.
    """
    budget_s = options.parse_duration_s(budget)
    if ranker is not None and strategy and LEARNED not in strategy:
        raise InvalidSetting(f"--ranker is for --strategy {LEARNED}; leave it out, or add that.")
    if not 1 <= repeats <= _MOST_REPEATS:
        raise InvalidSetting(f"--repeats {repeats} is out of range; use 1 to {_MOST_REPEATS}.")
    path = file or recording_path(detect_cpu())
    recordings = read_recordings(path)
    names = _names(strategy, recordings, has_ranker=ranker is not None)
    with ProgressLine("replay", later_s=0.0) as line:
        found = compare(
            recordings,
            names,
            budget_s=budget_s,
            seeds=range(seed, seed + repeats),
            ranker=read_ranker(ranker) if ranker else None,
            report=pace(line),
        )
    if as_json:
        print_json(_facts(path, recordings, found, budget_s=budget_s, seed=seed))
        return
    print_table(
        f"Searches of {duration_text(budget_s)}, {repeats} of each of "
        f"{counted(len(recordings), 'recording')} of {recordings[0].cpu.brand}",
        _HEADERS,
        [_row(name, figures_of(_all(runs))) for name, runs in found.items()],
    )
    if alone := _regrets_of_one_final(recordings):
        wrong = sum(not is_near_best(regret) for regret in alone) / len(alone)
        print_line(
            f"\nOf {len(alone)} finals that were recorded, {wrong:.0%} have a winner that is more "
            "than 2 % slower than another, by the other finals of the same candidates."
        )
    if (early := leaving(recordings)).took_part:
        print_line(
            f"{early.took_part} times a final had a kernel within 2 % of the fastest there; "
            f"{early.share:.1%} of these would have left after the first rounds."
        )
    print_line(
        "\nnear best: when the fastest so far was first within 2 % of the best recorded. lost: of "
        "the best speed, by the fastest so far. wrong winners: searches whose confirmed kernel is "
        "more than 2 % slower than the best."
    )


def _names(
    chosen: Sequence[str] | None, recordings: Sequence[Recording], *, has_ranker: bool
) -> list[str]:
    """Return the strategies to compare; without a ranker, the learned one only if asked for."""
    if chosen:
        return list(dict.fromkeys(chosen))
    names = list(STRATEGIES)
    if not has_ranker:
        try:
            check_trainable(recordings)
        except (InvalidSetting, MissingCapability) as error:
            names.remove(LEARNED)
            print_message(f'Leaving out "{LEARNED}": {error}')
    return names


def _all(runs: Sequence[Sequence[Run]]) -> list[Run]:
    return [run for of_one in runs for run in of_one]


def _regrets_of_one_final(recordings: Sequence[Recording]) -> list[float]:
    return [regret for one in recordings for regret in Samples(one).regrets_of_one_final()]


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    return (
        name,
        _time_text(figures.near_best_median_s),
        _time_text(figures.near_best_90th_s),
        *(f"{regret:.1%}" for regret in figures.regrets),
        f"{figures.tried:g}",
        f"{figures.wrong_winners:.0%}",
    )


def _time_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if isfinite(seconds) else "never"


def _facts(
    path: Path,
    recordings: Sequence[Recording],
    found: Mapping[str, Sequence[Sequence[Run]]],
    *,
    budget_s: float,
    seed: int,
) -> dict[str, Any]:
    return {
        "file": str(path),
        "cpu": recordings[0].cpu.brand,
        "budget_s": budget_s,
        "seed": seed,
        "regrets_of_one_final": _regrets_of_one_final(recordings),
        "left_too_early": asdict(leaving(recordings)),
        "strategies": {name: _figures_facts(_all(runs)) for name, runs in found.items()},
        "problems": [
            {
                "problem": recording.problem,
                "threads": recording.threads,
                "regime": recording.regime.value,
                "recorded": len(recording.candidates),
                "strategies": {name: _figures_facts(runs[place]) for name, runs in found.items()},
            }
            for place, recording in enumerate(recordings)
        ],
    }


def _figures_facts(runs: Sequence[Run]) -> dict[str, Any]:
    figures = figures_of(runs)
    return {
        "runs": figures.runs,
        "near_best_median_s": _finite(figures.near_best_median_s),
        "near_best_90th_s": _finite(figures.near_best_90th_s),
        "regret_at": {f"{at:g}": lost for at, lost in zip(TIMES_S, figures.regrets, strict=True)},
        "tried": figures.tried,
        "wrong_winners": figures.wrong_winners,
    }


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None
