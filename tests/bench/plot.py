"""Draw what `gemm-tuner bench --json` printed: each layer's speed beside oneDNN's.

python tests/bench/plot.py bench.json docs/performance.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from gemm_tuner.domain.context import Regime

BASELINE = "onednn"
COLORS = {Regime.HOT: "#c2410c", Regime.COLD_WEIGHTS: "#1d4ed8"}
LABELS = {Regime.HOT: "hot caches", Regime.COLD_WEIGHTS: "weights from memory"}

Row = dict[str, Any]


def main(results: Path, picture: Path) -> None:
    """Draw one row a layer, the fastest beside oneDNN at the top."""
    rows = [
        row
        for row in json.loads(results.read_text())["layers"]
        if row["baseline"].startswith(BASELINE)
    ]
    ratios = {
        regime: {row["name"]: row["ratio"] for row in rows if row["regime"] == regime.value}
        for regime in Regime
    }
    names = sorted(ratios[Regime.HOT], key=lambda name: float(ratios[Regime.HOT][name]["median"]))
    mpl.rcParams["svg.hashsalt"] = "gemm-tuner"  # the same picture has the same bytes
    mpl.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(8, 0.22 * len(names) + 1.2), layout="constrained")
    axes.axvline(1.0, color="black", linewidth=1)
    for regime, offset in ((Regime.HOT, 0.15), (Regime.COLD_WEIGHTS, -0.15)):
        known = [
            (y, ratios[regime][name]) for y, name in enumerate(names) if name in ratios[regime]
        ]
        medians = [ratio["median"] for _y, ratio in known]
        axes.errorbar(
            medians,
            [y + offset for y, _ratio in known],
            xerr=[
                [max(0.0, ratio["median"] - ratio["low"]) for _y, ratio in known],
                [max(0.0, ratio["high"] - ratio["median"]) for _y, ratio in known],
            ],
            fmt="o",
            markersize=4,
            color=COLORS[regime],
            label=LABELS[regime],
        )
    axes.set_xscale("log", base=2)
    ticks = (0.75, 1, 1.5, 2, 3, 4, 6, 8)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("speed of the kernel over oneDNN, with its 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
