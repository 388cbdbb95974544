"""The sections of a page with the answers of one CPU, type of elements and context."""

from collections import Counter
from collections.abc import Callable, Sequence

from gemm_tuner.bench.roofline import footprint_bytes
from gemm_tuner.cli.reports.means import geometric_means
from gemm_tuner.cli.reports.page.answers import Answer
from gemm_tuner.cli.reports.page.content import Block, Section, Table, evenly
from gemm_tuner.cli.reports.page.searches import search_block
from gemm_tuner.cli.reports.page.summary import mark_of
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import context_text, counted, time_text
from gemm_tuner.plots.draw import draw_shares
from gemm_tuner.plots.ratios import RatioRow, draw_ratios

MOST_ROWS = 150  # of a plot: names can be read, and the file stays small
_MOST_POINTS = 500

# How a CPU may be named, the shortest first; the last tells all apart.
_NAMES: tuple[Callable[[Cpu], str], ...] = (
    lambda cpu: cpu.brand,
    lambda cpu: cpu.model_key,
    lambda cpu: cpu.class_key,
    lambda cpu: cpu.exact_key,
)
# The key of a group: CPU, type of elements and context.
Group = tuple[str, str, ExecutionContext]


def grouped(answers: Sequence[Answer]) -> dict[Group, list[Answer]]:
    """Return the answers of each group, those of the greatest ratio first."""
    groups: dict[Group, list[Answer]] = {}
    for answer in sorted(answers, key=lambda one: -one.measured.ratio.median):
        key = (answer.verdict.cpu_key, answer.problem.types.text, answer.context)
        groups.setdefault(key, []).append(answer)
    return dict(sorted(groups.items(), key=lambda item: _order(item[0])))


def _order(group: Group) -> tuple[str, str, int, str]:
    cpu_key, types, context = group
    return cpu_key, types, context.threads, context.regime.value


def group_sections(
    answers: Sequence[Answer], tell: Callable[[int, int], None] = lambda _done, _total: None
) -> list[Section]:
    """Return a section for each group: ratios, shares of the peak, searches and all figures.

    `tell` hears how many groups are drawn, of how many.
    """
    names, groups = names_of_cpus(answers), grouped(answers)
    sections = []
    for group, of_group in groups.items():
        sections.append(_section(group, of_group, names.get(group[0], "")))
        tell(len(sections), len(groups))
    return sections


def names_of_cpus(answers: Sequence[Answer]) -> dict[str, str]:
    """Return the shortest names that tell the CPUs apart, by their keys; none of a single CPU."""
    cpus = {answer.verdict.cpu_key: answer.cpu for answer in answers}
    if len(cpus) == 1:
        return {}
    kinds = ({key: name_of(cpu) for key, cpu in cpus.items()} for name_of in _NAMES)
    return next((names for names in kinds if len(set(names.values())) == len(cpus)), {})


def _section(group: Group, answers: Sequence[Answer], cpu_name: str) -> Section:
    _cpu_key, types, context = group
    title = ", ".join(filter(None, (types, context_text(context), cpu_name)))
    blocks = (_ratio_block(answers, title), _share_block(answers, title))
    return Section(title=title, blocks=(*blocks, search_block(answers, title)))


def _ratio_block(answers: Sequence[Answer], title: str) -> Block:
    decisions = Counter(map(mark_of, answers))
    counts = ", ".join(f"{count} {mark}" for mark, count in decisions.items())
    means = geometric_means(
        (answer.context, answer.measured.baseline, answer.measured) for answer in answers
    )
    drawn = evenly(answers, MOST_ROWS)
    return Block(
        words=(
            f"{counted(len(answers), 'answer')}: {counts}.",
            *(f"{mean.text[0].upper()}{mean.text[1:]}." for mean in means),
            *_sampled(len(drawn), len(answers), "ratio"),
        ),
        picture=draw_ratios(
            [
                RatioRow(
                    name=short_text(answer.problem),
                    ratios={mark_of(answer): (answer.measured.ratio, answer.measured.baseline)},
                )
                for answer in drawn
            ],
            f"Speed of the kernel over its baseline, {title}; the table below has the figures.",
        ),
        table=Table(
            title=f"All figures of {counted(len(answers), 'answer')}",
            columns=(
                "problem",
                "decision",
                ">ratio",
                ">95 % interval",
                ">time of a call",
                ">of the baseline",
                ">GFLOP/s",
                ">of the peak",
                ">FLOP/byte",
                "baseline",
                "candidate",
                ">tried",
                ">failed",
                ">timings to 2 %",
                "measured",
            ),
            rows=[_cells(answer) for answer in answers],
        ),
    )


def _sampled(drawn: int, of: int, order: str) -> tuple[str, ...]:
    if drawn == of:
        return ()
    return (
        (
            f"Drawn are {drawn} of {of}, taken evenly in the order of their {order}, "
            "the first and the last among them; the table has all."
        ),
    )


def _cells(answer: Answer) -> tuple[str, ...]:
    verdict, measured, search = answer.verdict, answer.measured, answer.search
    ratio, share = measured.ratio, answer.share_of_peak
    decision = verdict.decision.value
    if verdict.doubt:
        decision = f"{decision}; {verdict.doubt}"
    return (
        short_text(answer.problem),
        decision,
        f"{ratio.median:.3f}",
        interval_cell(ratio),
        time_text(measured.candidate_median_ns),
        time_text(measured.baseline_median_ns),
        f"{answer.gflop_per_s:.4g}",
        "" if share is None else f"{share:.1%}",
        f"{_flop_per_byte(answer):.3g}",
        measured.baseline,
        verdict.candidate.text if verdict.candidate else "",
        str(search.tried),
        str(search.failed),
        f"{search.settled_at} of {len(search.best_ns)}",
        f"{verdict.tried_at:%Y-%m-%d}" if verdict.tried_at else "",
    )


def _share_block(answers: Sequence[Answer], title: str) -> Block:
    """Return the plot over the roof that is known: the peak measured beside each kernel."""
    known = [answer for answer in answers if answer.share_of_peak is not None]
    if not known:
        return Block(
            words=(
                (
                    "Speed over the roofline: no peak was recorded beside these measurements, so "
                    "there is no plot. gemm-tuner bench measures it."
                ),
            )
        )
    by_flop = sorted(known, key=_flop_per_byte)
    drawn = evenly(by_flop, _MOST_POINTS)
    points: dict[str, list[tuple[float, float]]] = {}
    for answer in drawn:
        points.setdefault(mark_of(answer), []).append(
            (_flop_per_byte(answer), answer.share_of_peak or 0.0)
        )
    missing = len(answers) - len(known)
    return Block(
        words=(
            "Speed over the peak of arithmetic, over what a call computes for each byte.",
            *((f"No peak is known for {counted(missing, 'answer')}, left out.",) * (missing > 0)),
            *_sampled(len(drawn), len(by_flop), "FLOP for each byte"),
        ),
        picture=draw_shares(
            points, f"Speed over the peak of arithmetic, {title}; the table above has the figures."
        ),
    )


def _flop_per_byte(answer: Answer) -> float:
    problem = answer.problem
    rows = problem.m.high
    return problem.flop(rows) / max(1, footprint_bytes(problem, rows))


def short_text(problem: Problem) -> str:
    """Return a problem without its types, and without what most share: `128x3072x768 bias`."""
    words = [*problem.operation.words, problem.sizes_text]
    words += [problem.layout_text] if problem.layout_text != "nk" else []
    words += [problem.epilogue.text] if problem.epilogue.steps else []
    words += [problem.reduction.value] if problem.is_fixed else []
    return " ".join(words)


def interval_cell(ratio: Ratio) -> str:
    """Return the interval of a ratio for a cell: `1.190 to 1.230`."""
    return f"{ratio.low:.3f} to {ratio.high:.3f}"
