"""The plots of the page beside that of ratios. Each function returns one picture.

Points differ by their shape as well as by their colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from gemm_tuner.plots.theme import (
    BASELINE,
    FIRST,
    FONT_POINTS,
    INK,
    MARKS,
    MUTED,
    POINT_IN,
    TUNED,
    WIDTH_POINTS,
    plain,
    settings,
    svg_of,
)
from gemm_tuner.plots.ticks import ratio_ticks

_NAME_CHARACTERS = 56  # the key of a CPU tells it from others by its end


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

    A third line, if there is one, is that of a library for a range.
    """
    across = min(2, len(panels))
    rows = ceil(len(panels) / across)
    with settings():
        figure = Figure(
            figsize=(WIDTH_POINTS * POINT_IN, rows * 175 * POINT_IN),
            dpi=72,
            layout=ConstrainedLayoutEngine(h_pad=8 * POINT_IN),
        )
        grid = figure.subplots(rows, across, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, panels, strict=False):
            for line, (colour, shape) in zip(
                panel.lines, ((TUNED, "o"), (BASELINE, "D"), (FIRST, "s")), strict=False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A bar of a histogram: from `low` to `high`, so many of a mark."""

    mark: str
    low: float
    high: float
    count: int


def draw_histogram(
    columns: Sequence[Column],
    axis: str,
    says: str,
    *,
    is_logarithmic: bool = False,
) -> str:
    """Return bars over a figure, those of each mark on top of the others; 1 has a line.

    Figures are shares, or factors on a logarithmic axis.
    """
    with settings():
        figure, axes = _one_plot(190)
        tops: dict[float, float] = {}
        marks = [mark for mark in MARKS if any(one.mark == mark for one in columns)]
        for mark in marks:
            of_mark = [one for one in columns if one.mark == mark]
            colour = MARKS[mark][0]
            axes.bar(
                [one.low for one in of_mark],
                [one.count for one in of_mark],
                [one.high - one.low for one in of_mark],
                bottom=[tops.get(one.low, 0.0) for one in of_mark],
                align="edge",
                facecolor="none" if colour == MUTED else colour,
                edgecolor=colour,
                linewidth=0.5,
                hatch="////" if colour == MUTED else None,
                label=mark,
            )
            tops |= {one.low: tops.get(one.low, 0.0) + one.count for one in of_mark}
        low, high = min(one.low for one in columns), max(one.high for one in columns)
        if is_logarithmic:
            axes.set_xscale("log")
            low, high = min(low, 0.9), max(high, 1.1)
            axes.set_xlim(low, high)
            ticks = ratio_ticks(low, high)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_xlim(0, max(high, 1.0))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _position: f"{x:.0%}"))
        axes.axvline(1, color=INK, lw=1)
        axes.grid(visible=True, axis="y")
        axes.set_axisbelow(True)
        axes.set_xlabel(axis)
        axes.set_ylabel("answers")
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        _legend_above(axes, len(marks))
        return svg_of(figure, says)


def draw_bars(bars: Mapping[str, Mapping[str, float]], axis: str, says: str) -> str:
    """Return bars, one below the other, each of parts by their mark; `axis` says of what.

    Parts of a mark that is not one of a decision have the first colour.
    """
    height = 60.0 + 24.0 * len(bars)
    with settings():
        figure = Figure(
            figsize=(WIDTH_POINTS * POINT_IN, height * POINT_IN), dpi=72, layout="constrained"
        )
        axes = figure.add_subplot()
        names = list(bars)
        found = dict.fromkeys(part for bar in bars.values() for part in bar)
        parts = (
            sorted(found, key=list(MARKS).index) if found.keys() <= MARKS.keys() else list(found)
        )
        left = [0.0] * len(names)
        for part in parts:
            widths = [bars[name].get(part, 0.0) for name in names]
            colour = MARKS.get(part, (FIRST, ""))[0]
            axes.barh(
                range(len(names)),
                widths,
                left=left,
                facecolor="none" if colour == MUTED else colour,
                edgecolor=colour,
                hatch="////" if colour == MUTED else None,
                height=0.6,
                label=part,
            )
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), [plain(name, _NAME_CHARACTERS) for name in names])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.grid(visible=True, axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel(axis)
        if all(width == int(width) for bar in bars.values() for width in bar.values()):
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if len(parts) > 1 or found.keys() <= MARKS.keys():
            _legend_above(axes, len(parts))
        return svg_of(figure, says)


def _one_plot(height_points: float) -> tuple[Figure, Axes]:
    figure = Figure(
        figsize=(WIDTH_POINTS * POINT_IN, height_points * POINT_IN),
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
