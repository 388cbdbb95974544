"""What a page says of searches: how they came near their best, and where the time went."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gemm_tuner.cli.reports.page.answers import BREAK_S, Answer, Contents, Search, Spent, Step
from gemm_tuner.cli.reports.page.content import Block, Section, Table, evenly
from gemm_tuner.domain.units import counted, duration_text
from gemm_tuner.plots.draw import Line, draw_bars, draw_searches

MOST_LINES = 60
_TIME = (
    "The time from one record of a problem to the next, by what the next one tells. Before a proof "
    "or a failure come rendering and compiling too, and some candidates are compiled while others "
    "are proved or timed: how long each took alone is not recorded. Nor is the time before the "
    "first record of a problem."
)


def search_block(answers: Sequence[Answer], title: str) -> Block:
    """Return how the searches of some answers came near their best, or that nothing tells."""
    told = [answer for answer in answers if len(answer.search.best_ns) > 1]
    if not told:
        untold = "How the searches went is not recorded: there is one timing for each answer."
        return Block(words=(untold,))
    drawn = evenly(told, MOST_LINES)
    searches = [answer.search for answer in drawn]
    marks = _marks(max(len(search.best_ns) for search in searches))
    medians = [median(search.over_last(mark) for search in searches) for mark in marks]
    words = [
        (
            "Half of these searches were within 2 % of their best after "
            f"{counted(round(median(search.settled_at for search in searches)), 'timing')}, of "
            f"{median(len(search.best_ns) for search in searches):g} in the median."
        ),
    ]
    if len(drawn) < len(answers):
        evenly_taken = ", taken evenly in the order of their ratio" if drawn != told else ""
        words.append(
            f"Drawn are {len(drawn)} of {len(answers)}, of those with two timings or "
            f"more{evenly_taken}."
        )
    return Block(
        words=tuple(words),
        picture=draw_searches(
            [
                Line(
                    name=answer.problem.sizes_text,
                    points=_points(answer.search),
                )
                for answer in drawn
            ],
            Line(name="median", points=list(zip(marks, medians, strict=True))),
            f"Least time so far over the number of timings, {title}; "
            "the table below has the figures.",
        ),
        table=Table(
            title=f"Least time after so many timings, over the last: {len(drawn)} searches",
            columns=("problem", *(f">{mark}" for mark in marks), ">timings"),
            rows=[
                ("median", *(f"{over:.3f}" for over in medians), ""),
                *(_cells(answer, marks) for answer in drawn),
            ],
        ),
    )


def _points(search: Search) -> list[tuple[float, float]]:
    """Return after which timings the least time changed, and what it is after the last."""
    overs = [search.over_last(number) for number in range(1, len(search.best_ns) + 1)]
    changes = [
        (number, over)
        for number, (before, over) in enumerate(pairwise(overs), start=2)
        if over < before
    ]
    return [(1, overs[0]), *changes, (len(overs), overs[-1])]


def _marks(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _cells(answer: Answer, marks: Sequence[int]) -> tuple[str, ...]:
    search = answer.search
    timings = len(search.best_ns)
    overs = (f"{search.over_last(mark):.3f}" if mark <= timings else "" for mark in marks)
    return answer.problem.sizes_text, *overs, str(timings)


def time_section(contents: Contents) -> Section | None:
    """Return where the time of sweeps into a database went, None if no sweep was."""
    spent = {step: contents.spent[step] for step in Step if step in contents.spent}
    if not any(one.seconds for one in spent.values()):
        return None
    total = Spent(
        records=sum(one.records for one in spent.values()),
        seconds=sum(one.seconds for one in spent.values()),
    )
    breaks = (
        f" {counted(contents.breaks, 'longer time')} between two records of a problem "
        f"{'is' if contents.breaks == 1 else 'are'} left out as breaks "
        f"(above {duration_text(BREAK_S)})."
        if contents.breaks
        else ""
    )
    minutes = {step.value: {"time": one.seconds / 60} for step, one in spent.items()}
    return Section(
        title="Where the time went",
        blocks=(
            Block(
                words=(f"{_TIME}{breaks}",),
                picture=draw_bars(
                    minutes, "minutes", "Time by what ended it; the table below has the figures."
                ),
                table=Table(
                    title="Time by what ended it",
                    columns=("until", ">records", ">time", ">share"),
                    rows=[
                        (
                            name,
                            str(one.records),
                            duration_text(one.seconds),
                            f"{one.seconds / total.seconds:.1%}",
                        )
                        for name, one in [
                            *((step.value, one) for step, one in spent.items()),
                            ("all", total),
                        ]
                    ],
                ),
            ),
        ),
    )
