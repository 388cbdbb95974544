"""The plot of ratios to baselines, a row for each problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.verdict import BASELINE_BELOW, TUNED_ABOVE
from gemm_tuner.plots.theme import (
    BAND,
    INK,
    MARKS,
    MUTED,
    POINT_IN,
    WIDTH_POINTS,
    plain,
    settings,
    svg_of,
)
from gemm_tuner.plots.ticks import ratio_ticks

_ROW_POINTS = 13.0
_NAME_POINTS = 205.0
_BESIDE_POINTS = 95.0
_APART = 0.36  # of a row, between the marks of two databases
_NAME_CHARACTERS = 36
_BESIDE_CHARACTERS = 17
_TOP_POINTS, _BOTTOM_POINTS = 30.0, 34.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRow:
    """A row of ratios to baselines: its name, and for each mark a ratio and the baseline's name."""

    name: str
    ratios: Mapping[str, tuple[Ratio, str]]


def draw_ratios(
    rows: Sequence[RatioRow],
    says: str,
    marks: Mapping[str, tuple[str, str]] = MARKS,
    names: Mapping[str, str] | None = None,
) -> str:
    """Return a plot with a line for each row: ratios and their intervals, the baseline beside it.

    `names` are what the legend calls the marks, their keys if nothing else is given.
    """
    height = _TOP_POINTS + _ROW_POINTS * len(rows) + _BOTTOM_POINTS
    with settings():
        figure = Figure(figsize=(WIDTH_POINTS * POINT_IN, height * POINT_IN), dpi=72)
        axes = figure.add_axes(
            (
                _NAME_POINTS / WIDTH_POINTS,
                _BOTTOM_POINTS / height,
                (WIDTH_POINTS - _NAME_POINTS - _BESIDE_POINTS) / WIDTH_POINTS,
                _ROW_POINTS * len(rows) / height,
            )
        )
        _draw_ratio_axis(axes, rows)
        for number, row in enumerate(rows):
            _name_row(axes, number, row)
        are_several = any(len(row.ratios) > 1 for row in rows)
        for turn, (mark, (colour, shape)) in enumerate(marks.items()):
            offset = (turn - (len(marks) - 1) / 2) * _APART if are_several else 0.0
            found = [
                (number + offset, row.ratios[mark][0])
                for number, row in enumerate(rows)
                if mark in row.ratios
            ]
            if not found:
                continue
            numbers = [number for number, _ratio in found]
            ratios = [ratio for _number, ratio in found]
            axes.hlines(
                numbers, [one.low for one in ratios], [one.high for one in ratios], colour, lw=1.3
            )
            axes.plot(
                [ratio.median for ratio in ratios],
                numbers,
                shape,
                color=colour,
                markersize=4.5,
                label=(names or {}).get(mark, mark),
            )
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1, 1, 0),
            bbox_transform=axes.transAxes,
            ncols=len(marks),
            borderaxespad=0.6,
            handletextpad=0.1,
            columnspacing=1.2,
        )
        return svg_of(figure, says)


def _draw_ratio_axis(axes: Axes, rows: Sequence[RatioRow]) -> None:
    ratios = [ratio for row in rows for ratio, _baseline in row.ratios.values()]
    low = min(0.95, *(one.low for one in ratios)) / 1.02
    high = max(1.05, *(one.high for one in ratios)) * 1.02
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    within = ratio_ticks(low, high)
    axes.set_xticks(within, [f"{tick:g}" for tick in within])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.axvspan(BASELINE_BELOW, TUNED_ABOVE, color=BAND, lw=0)
    axes.grid(visible=True, axis="x")
    axes.axvline(1, color=INK, lw=1)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("times the speed of the baseline, with 95 % interval (logarithmic)")


def _name_row(axes: Axes, number: int, row: RatioRow) -> None:
    baselines = dict.fromkeys(baseline for _ratio, baseline in row.ratios.values())
    beside = " / ".join(" ".join(baseline.split()[:2]) for baseline in baselines)
    for x, text, alignment, colour in (
        (-0.02, plain(row.name, _NAME_CHARACTERS), "right", INK),
        (1.02, plain(beside, _BESIDE_CHARACTERS), "left", MUTED),
    ):
        axes.text(
            x,
            number,
            text,
            transform=axes.get_yaxis_transform(),
            ha=alignment,
            va="center_baseline",
            color=colour,
        )
