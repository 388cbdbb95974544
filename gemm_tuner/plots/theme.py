"""From a figure of matplotlib to a picture inside a page, in the colours of the page.

A picture is drawn in colours that stand for names. They become variables of CSS, so one picture
serves light and dark pages.
"""

import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from html import escape
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from gemm_tuner.domain.printable import LINE_BREAK, harmless

# Colours of nothing that is ever seen: each is replaced by the variable of its name.
# fmt: off
INK      = "#0a0b01"
MUTED    = "#0a0b02"
GRID     = "#0a0b03"
BAND     = "#0a0b04"
TUNED    = "#0a0b05"
TIE      = "#0a0b06"
BASELINE = "#0a0b07"
FIRST    = "#0a0b08"
SECOND   = "#0a0b09"
# fmt: on
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    BAND: "band",
    TUNED: "tuned",
    TIE: "tie",
    BASELINE: "baseline",
    FIRST: "first",
    SECOND: "second",
}

# For a picture in a file of its own, on a light and on a dark page; as in cli/page/page.css.
# fmt: off
_PAGES: Mapping[str, tuple[str, str]] = {
    "page":     ("#ffffff", "#0d1117"),
    "ink":      ("#1f2328", "#f0f6fc"),
    "muted":    ("#59636e", "#9198a1"),
    "grid":     ("#d8dee4", "#30363d"),
    "band":     ("#eef1f4", "#1b222b"),
    "tuned":    ("#0072b2", "#56b4e9"),
    "tie":      ("#6b7280", "#a8b1bb"),
    "baseline": ("#c2410c", "#f59e0b"),
    "first":    ("#0072b2", "#56b4e9"),
    "second":   ("#c2410c", "#f59e0b"),
}
# fmt: on

# The marks of decisions, and of the two databases of a comparison: colour and shape.
# fmt: off
MARKS: Mapping[str, tuple[str, str]] = {
    "tuned":        (TUNED, "o"),
    "tie":          (TIE, "s"),
    "baseline":     (BASELINE, "D"),
    "no library":   (INK, "^"),
    "not believed": (MUTED, "x"),
}
PAIR: Mapping[str, tuple[str, str]] = {
    "first":  (FIRST, "o"),
    "second": (SECOND, "D"),
}
# fmt: on

POINT_IN = 1 / 72
WIDTH_POINTS = 640.0
FONT_POINTS = 9
_FONT = "DejaVu Sans"  # comes with matplotlib, which measures texts by it
_SETTINGS: dict[Any, Any] = {
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "font.family": _FONT,
    "font.size": FONT_POINTS,
    "text.parse_math": False,  # a name may have two dollars in it
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": FONT_POINTS,
    "axes.titlelocation": "left",
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": FONT_POINTS,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "gemm-tuner",  # the same picture twice has the same names in it
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": FONT_POINTS,
    "ytick.labelsize": FONT_POINTS,
}

_TAG = re.compile(r"<[^<>]+>")
_ID = re.compile(r' id="([^"]*)"')
_REFERENCE = re.compile(r"#([\w.-]+)")
_COLOUR = re.compile(r"#0a0b0\d")
# What the page's style says of all texts, and turns by nothing.
_COMMON = re.compile(
    rf"font-size: {FONT_POINTS}px; font-family: '{_FONT}'; | transform=\"rotate\(-?0 [^\"]*\""
)
_STYLE = re.compile(r' style="([^"]*)"')
_LONG_FRACTION = re.compile(r"(\d+\.\d\d)\d+")


def settings() -> AbstractContextManager[None]:
    """Return the context in which figures are made and drawn."""
    return rc_context(_SETTINGS)


def plain(text: str, most: int | None = None) -> str:
    """Return text of a database as a picture may show it: on one line, cut to `most` characters."""
    shown = harmless(text).translate(LINE_BREAK)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def svg_of(figure: Figure, says: str) -> str:
    """Return a figure as an element of HTML; `says` describes it to whoever cannot see it."""
    drawn = StringIO()
    with warnings.catch_warnings():
        # Texts stay texts in the picture: the reader's fonts have what matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        _lay_out(figure)
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    referred = {match for tag in _TAG.findall(text) for match in _REFERENCE.findall(tag)}

    def tidy(tag: re.Match[str]) -> str:
        """Shorten a tag. What is between tags may be text of a database, and stays."""
        kept = _ID.sub(lambda found: found[0] if found[1] in referred else "", tag[0])
        kept = _COLOUR.sub(lambda found: f"var(--{_VARIABLES[found[0]]})", kept)
        kept = _COMMON.sub("", kept)
        return _LONG_FRACTION.sub(r"\1", kept)

    text = _styles_as_classes(_TAG.sub(tidy, text))
    text = re.sub(r">\s+<", ">\n<", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(plain(says))}" ', 1)


def _lay_out(figure: Figure) -> None:
    """Lay out a figure; left to `savefig`, that draws the whole figure once more."""
    engine = figure.get_layout_engine()
    if engine is not None:
        FigureCanvasSVG(figure)  # measures texts as the picture has them
        engine.execute(figure)
        figure.set_layout_engine(None)


def in_own_file(svg: str) -> str:
    """Return a picture that `svg_of` made as a file of its own, with colours and a background."""
    light, dark = (
        "".join(f"--{name}:{colours[page]};" for name, colours in _PAGES.items()) for page in (0, 1)
    )
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    background = '<rect width="100%" height="100%" fill="var(--page)"/>'
    head, tag, rest = svg.partition("</defs>")
    assert tag, "matplotlib writes its styles first"
    font = f"text{{font:{FONT_POINTS}px sans-serif}}"
    return f"{head}<style>{style}{font}</style>{tag}{background}{rest}"


def _styles_as_classes(text: str) -> str:
    """Say each style once, as a class that is the same in all pictures.

    No element has a style of its own, so a page may forbid these.
    """
    found = {style: None for tag in _TAG.findall(text) for style in _STYLE.findall(tag)}
    classes = {style: f"s{sha256(style.encode()).hexdigest()[:8]}" for style in found}
    text = _TAG.sub(
        lambda tag: _STYLE.sub(lambda style: f' class="{classes[style[1]]}"', tag[0]), text
    )
    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    return text.replace("</style>", f"{rules}</style>", 1)
