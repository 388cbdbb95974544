"""The sections of a page that set the answers of two databases side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

from gemm_tuner.cli.reports.page.answers import Answer, Contents
from gemm_tuner.cli.reports.page.content import Block, Section, Table
from gemm_tuner.cli.reports.page.groups import MOST_ROWS, interval_cell, short_text
from gemm_tuner.cli.reports.page.summary import mark_of
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import context_text, counted, time_text
from gemm_tuner.plots.ratios import RatioRow, draw_ratios
from gemm_tuner.plots.theme import PAIR

_Key = tuple[Problem, ExecutionContext]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The answers of two databases to one question, on the same CPU where both have one."""

    first: Answer
    second: Answer

    @property
    def is_of_one_cpu(self) -> bool:
        """Say whether both are of one kind of CPU."""
        return self.first.verdict.cpu_key == self.second.verdict.cpu_key

    @property
    def is_one_measurement(self) -> bool:
        """Say whether both are the same measurement, as where records were copied."""
        first, second = self.first, self.second
        return self.is_of_one_cpu and first.measured == second.measured

    @property
    def has_one_baseline(self) -> bool:
        """Say whether both were timed beside the same library in the same version."""
        return self.first.measured.baseline == self.second.measured.baseline

    @property
    def differs(self) -> bool:
        """Say whether the answers differ, or one is not believed and the other is."""
        return mark_of(self.first) != mark_of(self.second)

    @property
    def distance(self) -> float:
        """Return how far the ratios are apart, whatever the direction."""
        return abs(log(self.first.measured.ratio.median / self.second.measured.ratio.median))


def pairs_of(first: Iterable[Answer], second: Iterable[Answer]) -> list[Pair]:
    """Return the answers to the same questions, those that differ first, then by their distance.

    A question is a problem, number of threads and regime. Where no CPU has answers in both
    databases, the newest of each are a pair.
    """
    firsts, seconds = _by_question(first), _by_question(second)
    pairs = []
    for key, of_first in firsts.items():
        of_second = seconds.get(key, {})
        shared = [cpu for cpu in of_first if cpu in of_second]
        pairs += [Pair(first=of_first[cpu], second=of_second[cpu]) for cpu in shared]
        if of_second and not shared:
            pairs.append(Pair(first=_newest(of_first.values()), second=_newest(of_second.values())))
    return sorted(pairs, key=lambda pair: (not pair.differs, -pair.distance))


def _by_question(answers: Iterable[Answer]) -> dict[_Key, dict[str, Answer]]:
    found: dict[_Key, dict[str, Answer]] = {}
    for answer in answers:
        key = (answer.problem, answer.context)
        found.setdefault(key, {})[answer.verdict.cpu_key] = answer
    return found


def _newest(answers: Iterable[Answer]) -> Answer:
    return max(answers, key=lambda answer: str(answer.verdict.tried_at))


def comparison_sections(first: Contents, second: Contents) -> list[Section]:
    """Return what two databases say of the same questions, in words and group by group."""
    pairs = pairs_of(first.answers, second.answers)
    names = {"first": first.name, "second": second.name}
    if first.name == second.name:
        names = {"first": f"{first.name} (first)", "second": f"{second.name} (second)"}
    groups: dict[tuple[str, int, str], list[Pair]] = {}
    for pair in pairs:
        context = pair.first.context
        key = (pair.first.problem.types.text, context.threads, context.regime.value)
        groups.setdefault(key, []).append(pair)
    return [
        Section(
            title="The two beside each other",
            blocks=(Block(words=tuple(_words(first, second, pairs, names))),),
        ),
        *(_section(groups[key], names) for key in sorted(groups)),
    ]


def _words(
    first: Contents, second: Contents, pairs: Sequence[Pair], names: dict[str, str]
) -> list[str]:
    paired = {id(answer) for pair in pairs for answer in (pair.first, pair.second)}
    alone = [
        sum(id(answer) not in paired for answer in contents.answers) for contents in (first, second)
    ]
    differing = sum(pair.differs for pair in pairs)
    on_others = sum(not pair.is_of_one_cpu for pair in pairs)
    beside_others = sum(not pair.has_one_baseline for pair in pairs)
    words = [
        (
            f"{counted(len(pairs), 'question')} (a problem, number of threads and regime) "
            f"{'has' if len(pairs) == 1 else 'have'} an answer in both: "
            f"{differing} differ{'s' if differing == 1 else ''}, {len(pairs) - differing} agree. "
            f"{counted(alone[0], 'more answer')} in {names['first']} alone, and {alone[1]} in "
            f"{names['second']} alone."
        ),
    ]
    if not pairs:
        return words
    words.append(
        "The times of the two were not measured together, so they are not set against each "
        "other: the machine may have changed in between. What can be compared is the speed of "
        "each kernel over its own baseline, timed in the same rounds. A baseline may have been "
        "disturbed on one day and not on the other, so a small difference of two ratios says "
        "nothing; gemm-tuner bench times kernels together."
    )
    if beside_others:
        words.append(
            f"{counted(beside_others, 'pair')} stand{'s' if beside_others == 1 else ''} beside "
            "different baselines or versions: there the two ratios are over different speeds."
        )
    same = sum(pair.is_one_measurement for pair in pairs)
    if same:
        words.append(
            f"{counted(same, 'pair')} {'is' if same == 1 else 'are'} of one measurement, which is "
            "in both databases."
        )
    if on_others:
        words.append(
            f"{counted(on_others, 'pair')} {'was' if on_others == 1 else 'were'} measured on "
            "different kinds of CPU."
        )
    return words


def _section(pairs: Sequence[Pair], names: dict[str, str]) -> Section:
    sample = pairs[0].first
    drawn = sorted(pairs[:MOST_ROWS], key=lambda pair: -pair.first.measured.ratio.median)
    title = f"{sample.problem.types.text}, {context_text(sample.context)}"
    differing = sum(pair.differs for pair in pairs)
    words = [f"{counted(len(pairs), 'pair')}, of which {differing} differ."]
    if len(drawn) < len(pairs):
        words.append(
            f"Drawn are {len(drawn)}: those that differ first, then those whose ratios are the "
            "farthest apart; the table has all."
        )
    first, second = names["first"], names["second"]
    return Section(
        title=f"Both: {title}",
        blocks=(
            Block(
                words=tuple(words),
                picture=draw_ratios(
                    [
                        RatioRow(
                            name=short_text(pair.first.problem),
                            ratios={
                                mark: (answer.measured.ratio, answer.measured.baseline)
                                for mark, answer in (
                                    ("first", pair.first),
                                    ("second", pair.second),
                                )
                            },
                        )
                        for pair in drawn
                    ],
                    f"Speed over the baseline in both databases, {title}; "
                    "the table below has the figures.",
                    PAIR,
                    names,
                ),
                table=Table(
                    title=f"All figures of {counted(len(pairs), 'pair')}",
                    columns=(
                        "problem",
                        "answers",
                        *(
                            f"{mark}{name}: {what}"
                            for name in (first, second)
                            for mark, what in (
                                ("", "decision"),
                                (">", "ratio"),
                                (">", "95 % interval"),
                                ("", "baseline"),
                                (">", "its time"),
                                ("", "measured"),
                            )
                        ),
                    ),
                    rows=[_cells(pair) for pair in pairs],
                ),
            ),
        ),
    )


def _cells(pair: Pair) -> tuple[str, ...]:
    said = ["differ" if pair.differs else "agree"]
    said += [] if pair.has_one_baseline else ["other baseline"]
    said += [] if pair.is_of_one_cpu else ["other CPU"]
    said += ["same measurement"] if pair.is_one_measurement else []
    return (
        short_text(pair.first.problem),
        ", ".join(said),
        *_side(pair.first),
        *_side(pair.second),
    )


def _side(answer: Answer) -> tuple[str, ...]:
    measured, tried_at = answer.measured, answer.verdict.tried_at
    return (
        mark_of(answer),
        f"{measured.ratio.median:.3f}",
        interval_cell(measured.ratio),
        measured.baseline,
        time_text(measured.baseline_median_ns),
        f"{tried_at:%Y-%m-%d}" if tried_at else "",
    )
