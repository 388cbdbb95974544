"""The plots of the page. Each function returns one picture.

Points differ by their shape as well as by their colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from gemm_tuner.cli.page.theme import (
    BAND,
    BASELINE,
    FIRST,
    FONT_POINTS,
    INK,
    MUTED,
    SECOND,
    TIE,
    TUNED,
    plain,
    settings,
    svg_of,
)
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.verdict import BASELINE_BELOW, TUNED_ABOVE

_POINT_IN = 1 / 72
_WIDTH_POINTS = 640.0
_ROW_POINTS = 13.0
_NAME_POINTS = 205.0
_BESIDE_POINTS = 95.0
_APART = 0.36  # of a row, between the marks of two databases
_NAME_CHARACTERS = 36
_BESIDE_CHARACTERS = 17
_TOP_POINTS, _BOTTOM_POINTS = 30.0, 34.0
_TICKS_ABOVE = (1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)
_TICKS_BELOW = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_MOST_RATIO_TICKS = 11

# The marks of decisions, and of the two databases of a comparison: colour and shape.
# fmt: off
MARKS: Mapping[str, tuple[str, str]] = {
    "tuned":        (TUNED, "o"),
    "tie":          (TIE, "s"),
    "baseline":     (BASELINE, "D"),
    "not believed": (MUTED, "x"),
}
PAIR: Mapping[str, tuple[str, str]] = {
    "first":  (FIRST, "o"),
    "second": (SECOND, "D"),
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRow:
    """A row of ratios to baselines: its name, and for each mark a ratio and the baseline's name."""

    name: str
    ratios: Mapping[str, tuple[Ratio, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through points, by the name of what it is of."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A small plot among others."""

    title: str
    lines: Sequence[Line]


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
        figure = Figure(figsize=(_WIDTH_POINTS * _POINT_IN, height * _POINT_IN), dpi=72)
        axes = figure.add_axes(
            (
                _NAME_POINTS / _WIDTH_POINTS,
                _BOTTOM_POINTS / height,
                (_WIDTH_POINTS - _NAME_POINTS - _BESIDE_POINTS) / _WIDTH_POINTS,
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
    least_apart = log(high / low) / _MOST_RATIO_TICKS
    within = [1.0]
    for ticks in (_TICKS_ABOVE, _TICKS_BELOW):
        last = 1.0
        for tick in ticks:
            if low <= tick <= high and abs(log(tick / last)) >= least_apart:
                within.append(tick)
                last = tick
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


def draw_shares(points: Mapping[str, Sequence[tuple[float, float]]], says: str) -> str:
    """Return a plot of shares of the peak over FLOP per byte; `points` are by their mark."""
    with settings():
        figure, axes = _one_plot(250)
        for mark, (colour, shape) in MARKS.items():
            if mark in points:
                xs, ys = zip(*points[mark], strict=True)
                axes.plot(xs, ys, shape, color=colour, markersize=4.5, alpha=0.85, label=mark)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _position: f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _position: f"{y:.0%}"))
        highest = max(share for of_mark in points.values() for _x, share in of_mark)
        axes.set_ylim(0, max(1.05, 1.05 * highest))
        axes.axhline(1, color=INK, lw=1)
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        axes.set_xlabel("FLOP for each byte that a call must touch (logarithmic)")
        axes.set_ylabel("of the peak of arithmetic")
        _legend_above(axes, len(points))
        return svg_of(figure, says)


def draw_searches(lines: Sequence[Line], middle: Line, says: str) -> str:
    """Return a plot of least times over trials: a thin line for each search, and their median."""
    with settings():
        figure, axes = _one_plot(250)
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            axes.step(xs, ys, where="post", color=MUTED, lw=0.7, alpha=0.55)
        xs, ys = zip(*middle.points, strict=True)
        axes.step(xs, ys, where="post", color=TUNED, lw=2.2, label=middle.name)
        axes.axhline(1, color=INK, lw=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _position: f"{x:g}"))
        highest = max((y for line in lines for _x, y in line.points), default=1.0)
        axes.set_ylim(0.98, min(3.0, max(1.1, highest * 1.02)))
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        axes.set_xlabel("timings (logarithmic)")
        axes.set_ylabel("least time so far, over the last")
        _legend_above(axes, 1)
        return svg_of(figure, says)


def draw_panels(panels: Sequence[Panel], says: str) -> str:
    """Return small plots of speed over m, two in a row, with the kernel's line and the baseline's.

    Panels have up to two lines.
    """
    rows = ceil(len(panels) / 2)
    with settings():
        figure = Figure(
            figsize=(_WIDTH_POINTS * _POINT_IN, rows * 175 * _POINT_IN),
            dpi=72,
            layout=ConstrainedLayoutEngine(h_pad=8 * _POINT_IN),
        )
        grid = figure.subplots(rows, 2, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, panels, strict=False):
            for line, (colour, shape) in zip(
                panel.lines, ((TUNED, "o"), (BASELINE, "D")), strict=False
            ):
                xs, ys = zip(*line.points, strict=True)
                axes.plot(
                    xs, ys, f"{shape}-", color=colour, markersize=4, lw=1.2, label=plain(line.name)
                )
            ticks = sorted({x for line in panel.lines for x, _y in line.points})
            ticks = ticks[:: ceil(len(ticks) / 9)]
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(bottom=0)
            axes.grid(visible=True)
            axes.set_axisbelow(True)
            axes.set_title(plain(panel.title, 52))
            axes.set_xlabel("m, rows of x")
            axes.set_ylabel("GFLOP/s")
            axes.legend(loc="best")
        return svg_of(figure, says)


def draw_bars(bars: Mapping[str, Mapping[str, float]], axis: str, says: str) -> str:
    """Return bars, one below the other, each of parts by their mark; `axis` says of what.

    Parts of a mark that is not one of a decision have the first colour.
    """
    height = 60.0 + 24.0 * len(bars)
    with settings():
        figure = Figure(
            figsize=(_WIDTH_POINTS * _POINT_IN, height * _POINT_IN), dpi=72, layout="constrained"
        )
        axes = figure.add_subplot()
        names = list(bars)
        parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
        left = [0.0] * len(names)
        for part in parts:
            widths = [bars[name].get(part, 0.0) for name in names]
            colour = MARKS.get(part, (FIRST, ""))[0]
            axes.barh(range(len(names)), widths, left=left, color=colour, height=0.6, label=part)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), [plain(name, _NAME_CHARACTERS) for name in names])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.grid(visible=True, axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel(axis)
        if len(parts) > 1:
            _legend_above(axes, len(parts))
        return svg_of(figure, says)


def _one_plot(height_points: float) -> tuple[Figure, Axes]:
    figure = Figure(
        figsize=(_WIDTH_POINTS * _POINT_IN, height_points * _POINT_IN),
        dpi=72,
        layout="constrained",
    )
    return figure, figure.add_subplot()


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=max(1, columns),
        borderaxespad=0.3,
        handletextpad=0.3,
        columnspacing=1.2,
        fontsize=FONT_POINTS,
    )
