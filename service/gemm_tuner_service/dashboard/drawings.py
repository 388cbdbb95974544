"""The pictures of pages, of plain figures, drawn where matplotlib is loaded: `artist.py`."""

from gemm_tuner.domain.measurement import Ratio


def bars(rows: tuple[tuple[str, tuple[tuple[str, int], ...]], ...], axis: str, says: str) -> str:
    """Return a bar for each name, in which each mark has its count."""
    from gemm_tuner.plots.draw import draw_bars  # noqa: PLC0415 - loads matplotlib

    counts = {name: {mark: float(count) for mark, count in of_name} for name, of_name in rows}
    return draw_bars(counts, axis, says)


def histogram(
    steps: tuple[tuple[str, float, float, int], ...],
    axis: str,
    says: str,
    is_logarithmic: bool,  # noqa: FBT001 - figures are told by their places
) -> str:
    """Return bars over a figure; a step is a mark, the least and the most, and a count."""
    from gemm_tuner.plots.draw import Column, draw_histogram  # noqa: PLC0415 - loads matplotlib

    columns = [
        Column(mark=mark, low=low, high=high, count=count) for mark, low, high, count in steps
    ]
    return draw_histogram(columns, axis, says, is_logarithmic=is_logarithmic)


def ratios(rows: tuple[tuple[str, str, Ratio, str], ...], says: str) -> str:
    """Return a line for each candidate: its name, a mark, the ratio and the baseline's name."""
    from gemm_tuner.plots.ratios import RatioRow, draw_ratios  # noqa: PLC0415 - loads matplotlib

    return draw_ratios(
        [
            RatioRow(name=name, ratios={mark: (ratio, baseline)})
            for name, mark, ratio, baseline in rows
        ],
        says,
    )


def curve(points: tuple[tuple[int, float, float], ...], title: str, says: str) -> str:
    """Return the speeds of the kernel and of the baseline over m."""
    from gemm_tuner.plots.draw import Line, Panel, draw_panels  # noqa: PLC0415 - loads matplotlib

    lines = (
        Line(name="kernel", points=[(m, speed) for m, speed, _baseline in points]),
        Line(name="baseline, by the ratio", points=[(m, speed) for m, _own, speed in points]),
    )
    return draw_panels([Panel(title=title, lines=lines)], says)
