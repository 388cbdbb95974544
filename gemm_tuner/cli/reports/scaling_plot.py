"""Draw how a call scales with its threads, by matplotlib, as SVG or PNG."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from gemm_tuner.scaling.simulate import Bound, Simulated
from gemm_tuner.user_file import user_file

# Bounds differ by shape, regimes by line and colour.
_MARKS = {
    Bound.COMPUTE: "o",
    Bound.L3: "s",
    Bound.MEMORY: "D",
    Bound.LINK: "^",
    Bound.UNEVEN: "v",
    Bound.BARRIER: "X",
}
_STYLES = (("#2563eb", "-"), ("#b45309", "--"))
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gemm-tuner",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def write_scaling_plot(
    path: Path, title: str, lines: Mapping[str, Sequence[tuple[Simulated, float]]]
) -> None:
    """Write a picture of speed-ups over threads, with a mark for what bounds each.

    `lines` are by name; each point is a simulated call and its speed-up.

    Raises:
        InvalidSetting: the file cannot be written.
    """
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        threads = sorted({one.threads for line in lines.values() for one, _speed_up in line})
        axes.plot(threads, threads, color="#9ca3af", linewidth=0.8, label="ideal")
        for (name, line), (colour, dashes) in zip(lines.items(), _STYLES, strict=False):
            points = [(one.threads, speed_up) for one, speed_up in line]
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, label=name)
            for one, speed_up in line:
                axes.plot(one.threads, speed_up, _MARKS[one.bound], color=colour)
        for bound in dict.fromkeys(one.bound for line in lines.values() for one, _ in line):
            label = f"bound by {bound.value}"
            axes.plot([], [], _MARKS[bound], color="#4b5563", label=label)
        for scale in (axes.set_xscale, axes.set_yscale):
            scale("log", base=2)
        axes.set_xticks(threads)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.set_xlabel("threads")
        axes.set_ylabel("speed over one thread")
        axes.set_title(title, fontsize=8, loc="left")
        axes.legend(fontsize=8)
        kind = path.suffix.removeprefix(".")
        drawn = BytesIO()
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    with user_file(path) as file:
        file.write(drawn.getbuffer())
