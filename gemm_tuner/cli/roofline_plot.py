"""Draw the speed of kernels and baselines over the roofline, as SVG."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from gemm_tuner.cli.bench_report import BenchRow
from gemm_tuner.cli.report import context_text
from gemm_tuner.errors import InvalidSetting

_KERNEL = "kernel"
_KERNEL_COLOUR = "#b91c1c"
_COLOURS = ("#1d4ed8", "#047857", "#b45309", "#7e22ce", "#0e7490", "#4d7c0f", "#6b7280")

# Lengths in pixels.
_ROW = 18
_NAMES_WIDTH = 340
_PLOT_WIDTH = 560
_LEGEND_WIDTH = 170
_MARGIN = 14
_HEAD = 34
_RADIUS = 5
_CHARACTERS_OF_A_NAME = 38

_STEP = 0.2  # between two lines of the grid, in parts of the roofline
_TEXT = 'font-family="sans-serif" font-size="11"'


def write_plot(path: Path, rows: Sequence[BenchRow]) -> None:
    """Write a picture with a line for each row, those nearest to the roofline at the top.

    Raises:
        InvalidSetting: the file cannot be written.
    """
    try:
        path.write_text("\n".join(_draw(rows)) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(
            f"file {path} cannot be written: {error}; give another one."
        ) from error


def _draw(rows: Sequence[BenchRow]) -> Iterator[str]:
    lines = sorted(
        ((_label(row), _shares(row)) for row in rows), key=lambda line: -line[1][_KERNEL]
    )
    names = list(dict.fromkeys(name for _label, shares in lines for name in shares))
    colours = {
        name: _KERNEL_COLOUR if name == _KERNEL else _COLOURS[(turn - 1) % len(_COLOURS)]
        for turn, name in enumerate(names)
    }
    steps = max(5, *(1 + int(share / _STEP) for _, shares in lines for share in shares.values()))
    per_share = _PLOT_WIDTH / (steps * _STEP)
    height = _HEAD + _ROW * max(len(lines), len(names)) + 2 * _MARGIN
    width = _NAMES_WIDTH + _PLOT_WIDTH + _LEGEND_WIDTH + 2 * _MARGIN
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_TEXT}>'
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield _text_at(_NAMES_WIDTH, _MARGIN, "speed over the roofline")
    bottom = _HEAD + _ROW * len(lines)
    for step in range(steps + 1):
        x = _NAMES_WIDTH + step * _STEP * per_share
        colour = "black" if step * _STEP == 1.0 else "#dddddd"
        yield f'<path d="M{x:.1f} {_HEAD}V{bottom}" stroke="{colour}"/>'
        yield _text_at(x, _HEAD - 5, f"{step * _STEP:.0%}", anchor="middle")
    for number, (label, shares) in enumerate(lines):
        y = _HEAD + _ROW * (number + 0.5)
        yield _text_at(_NAMES_WIDTH - 8, y + 4, label, anchor="end")
        # The kernel comes last, over the others.
        for name in sorted(shares, key=lambda name: name == _KERNEL):
            x = _NAMES_WIDTH + shares[name] * per_share
            yield _marker(x, y, colours[name], is_kernel=name == _KERNEL)
    for number, name in enumerate(names):
        x, y = _NAMES_WIDTH + _PLOT_WIDTH + 2 * _MARGIN, _HEAD + _ROW * (number + 0.5)
        yield _marker(x, y, colours[name], is_kernel=name == _KERNEL)
        yield _text_at(x + 10, y + 4, name)
    yield "</svg>"


def _label(row: BenchRow) -> str:
    name = row.layer.name
    if len(name) > _CHARACTERS_OF_A_NAME:
        name = f"{name[: _CHARACTERS_OF_A_NAME - 1]}…"
    return f"{name}, {context_text(row.verdict.context)}"


def _shares(row: BenchRow) -> dict[str, float]:
    """Return the speed of each callee in parts of the roofline."""
    shares = {_KERNEL: row.roofline_ns / row.kernel_ns}
    for beside in row.measurements:
        shares[beside.baseline] = row.roofline_ns / beside.baseline_timing.median_ns
    return shares


def _marker(x: float, y: float, colour: str, *, is_kernel: bool) -> str:
    if is_kernel:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" fill="{colour}"/>'
    return (
        f'<path d="M{x:.1f} {y - _RADIUS:.1f}v{2 * _RADIUS}" stroke="{colour}" stroke-width="3"/>'
    )


def _text_at(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
