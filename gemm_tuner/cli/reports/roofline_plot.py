"""Draw the speed of kernels and baselines over the roofline, as SVG.

The picture has a background of its own and colours for a light and a dark page, so that it can be
read on both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gemm_tuner.cli.reports.bench_report import BenchRow
from gemm_tuner.domain.units import context_text
from gemm_tuner.user_file import user_file

KERNEL = "kernel"

# Lengths in pixels; a character is as wide as most of a sans-serif font of this size.
_FONT = 12
_CHARACTER = 6.8
_ROW = 19
_MARGIN = 12
_WIDTH = 880
_LEAST_PLOT_WIDTH = 420
_RADIUS = 4.5
_LEGEND_GAP = 26

_STEP = 0.2  # between two lines of the grid, in parts of the roofline
_CHARACTERS_OF_A_NAME = 30

# A colour on a light and on a dark page; the kernel's is the first.
_COLOURS = (
    ("#dc2626", "#ff6b6b"),
    ("#2563eb", "#6ea8fe"),
    ("#047857", "#34d399"),
    ("#b45309", "#fbbf24"),
    ("#7e22ce", "#c084fc"),
    ("#0e7490", "#22d3ee"),
    ("#4d7c0f", "#a3e635"),
    ("#6b7280", "#9ca3af"),
)
# What else has a colour, on a light and on a dark page.
_RULES = {
    ".page{fill:%s}": ("#ffffff", "#0d1117"),
    ".band{fill:%s}": ("#f6f8fa", "#151b23"),
    ".grid{stroke:%s}": ("#d8dee4", "#30363d"),
    ".limit{stroke:%s}": ("#1f2328", "#f0f6fc"),
    "text{fill:%s}": ("#1f2328", "#f0f6fc"),
    ".muted{fill:%s}": ("#59636e", "#9198a1"),
    **{f".c{turn}{{fill:%s}}": colours for turn, colours in enumerate(_COLOURS)},
}
# The outline of each baseline's marker, around its centre: no two differ by their colour alone.
_OUTLINES = (
    "m0 -5l5 5l-5 5l-5 -5z",
    "m-4 -4h8v8h-8z",
    "m0 -5l5 9h-10z",
    "m0 5l5 -9h-10z",
    "m-1.5 -5h3v10h-3z",
    "m-5 -1.5h10v3h-10z",
    "m-4 -4h2l2 3l2 -3h2l-3 4l3 4h-2l-2 -3l-2 3h-2l3 -4z",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """A layer in the picture: `shares` are speeds in parts of the roofline, with `KERNEL` one.

    `context` says how it was timed, such as `f32, hot, 1 thread`.
    """

    name: str
    sizes: str
    context: str
    shares: Mapping[str, float]


def write_plot(path: Path, rows: Sequence[BenchRow]) -> None:
    """Write a picture with a line for each row, those nearest to the roofline at the top.

    Raises:
        InvalidSetting: the file cannot be written.
    """
    content = draw([_line_of(row) for row in rows]).encode()
    with user_file(path) as file:
        file.write(content)


def draw(lines: Sequence[PlotLine]) -> str:
    """Return the picture, with the lines nearest to the roofline at the top."""
    return "\n".join(_Picture(lines).elements()) + "\n"


def _line_of(row: BenchRow) -> PlotLine:
    problem = row.layer.problem
    shares = {KERNEL: row.share_of_roofline}
    for beside in row.measurements:
        shares[beside.baseline] = row.share_of(beside.baseline_timing)
    return PlotLine(
        name=row.layer.name,
        sizes=problem.sizes_text,
        context=f"{problem.types.text}, {context_text(row.verdict.context)}",
        shares=shares,
    )


class _Picture:
    """Where everything is: names and sizes on the left, the plot beside them, the legend above."""

    def __init__(self, lines: Sequence[PlotLine]) -> None:
        self._lines = sorted(lines, key=lambda line: -line.shares[KERNEL])
        self._runners = list(dict.fromkeys(name for line in self._lines for name in line.shares))
        contexts = {line.context for line in lines}
        self._common_context = contexts.pop() if len(contexts) == 1 else None
        names = [(_short(line.name), self._detail(line)) for line in self._lines]
        longest = [max((len(name[side]) for name in names), default=0) for side in (0, 1)]
        self._left = 2 * _MARGIN + _CHARACTER * (sum(longest) + 2)
        self._width = max(_WIDTH, self._left + _LEAST_PLOT_WIDTH + 2 * _MARGIN)
        self._legend = list(self._legend_places())
        self._top = self._legend[-1][1] + 2.5 * _ROW
        self._bottom = self._top + _ROW * len(self._lines)
        shares = [share for line in self._lines for share in line.shares.values()]
        self._steps = max(5, *(1 + int(share / _STEP) for share in shares))

    def elements(self) -> Iterator[str]:
        height = self._bottom + 2.5 * _MARGIN
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width:.0f}" '
            f'height="{height:.0f}" viewBox="0 0 {self._width:.0f} {height:.0f}" '
            f'font-family="sans-serif" font-size="{_FONT}">'
        )
        yield _style()
        yield '<rect class="page" width="100%" height="100%"/>'
        context = f"{self._common_context}: " if self._common_context else ""
        yield _text(_MARGIN, _ROW, f"{context}speed over the roofline", 'font-weight="bold"')
        for name, (x, y) in zip(self._runners, self._legend, strict=True):
            yield self._marker(name, x, y)
            yield _text(x + 10, y + 4, name)
        yield from self._bands()
        yield from self._grid()
        for number, line in enumerate(self._lines):
            yield from self._elements_of(line, self._top + _ROW * (number + 0.5))
        yield "</svg>"

    def _legend_places(self) -> Iterator[tuple[float, float]]:
        """Yield the centre of each runner's marker in the legend, over as many rows as it takes."""
        x, y = _MARGIN + _RADIUS, 2.0 * _ROW
        for name in self._runners:
            width = _LEGEND_GAP + _CHARACTER * len(name)
            if x + width > self._width and x > 2 * _MARGIN:
                x, y = _MARGIN + _RADIUS, y + _ROW
            yield x, y
            x += width

    def _bands(self) -> Iterator[str]:
        for number in range(0, len(self._lines), 2):
            y = self._top + _ROW * number
            yield f'<rect class="band" y="{y:.1f}" width="100%" height="{_ROW}"/>'

    def _grid(self) -> Iterator[str]:
        for step in range(self._steps + 1):
            x = self._x(step * _STEP)
            name = "limit" if round(step * _STEP, 9) == 1 else "grid"
            yield f'<path class="{name}" d="M{x:.1f} {self._top:.1f}V{self._bottom:.1f}"/>'
            for y in (self._top - 6, self._bottom + 1.3 * _FONT):
                yield _text(x, y, f"{step * _STEP:.0%}", 'class="muted" text-anchor="middle"')

    def _elements_of(self, line: PlotLine, y: float) -> Iterator[str]:
        yield _text(_MARGIN, y + 4, _short(line.name))
        yield _text(
            self._left - 1.5 * _MARGIN, y + 4, self._detail(line), 'class="muted" text-anchor="end"'
        )
        # The kernel comes last, over the others.
        for name in sorted(line.shares, key=lambda name: name == KERNEL):
            yield self._marker(name, self._x(line.shares[name]), y)

    def _marker(self, name: str, x: float, y: float) -> str:
        if name == KERNEL:
            return f'<circle class="c0" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}"/>'
        turn = [runner for runner in self._runners if runner != KERNEL].index(name)
        colour = 1 + turn % (len(_COLOURS) - 1)
        outline = _OUTLINES[turn % len(_OUTLINES)]
        return f'<path class="c{colour}" d="M{x:.1f} {y:.1f}{outline}"/>'

    def _detail(self, line: PlotLine) -> str:
        sizes = "" if line.sizes == line.name else line.sizes
        context = "" if self._common_context else line.context
        return ", ".join(filter(None, (sizes, context)))

    def _x(self, share: float) -> float:
        width = self._width - self._left - 2 * _MARGIN
        return self._left + share * width / (self._steps * _STEP)


def _short(name: str) -> str:
    if len(name) <= _CHARACTERS_OF_A_NAME:
        return name
    return f"{name[: _CHARACTERS_OF_A_NAME - 1]}…"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    words = f"text {attributes}".strip()
    return f'<{words} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _style() -> str:
    light, dark = ("".join(rule % pair[page] for rule, pair in _RULES.items()) for page in (0, 1))
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
