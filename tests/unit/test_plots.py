"""Axes of pictures say what is on them: ratios near one have a scale, and answers are whole."""

import re
from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from gemm_tuner.plots.draw import Column, draw_bars, draw_histogram
from gemm_tuner.plots.ticks import ratio_ticks


def _texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("span", [(0.931, 1.071), (0.9, 1.1), (0.5, 2.0), (0.005, 900.0)])
def test_an_axis_of_ratios_has_a_scale(span: tuple[float, float]) -> None:
    low, high = span

    ticks = sorted(ratio_ticks(low, high))

    assert 1.0 in ticks
    assert ticks[0] < 1.0 < ticks[-1]
    assert 4 <= len(ticks) <= 13
    assert all(low <= tick <= high for tick in ticks)
    least = (high / low) ** (1 / 11)
    assert all(after / before > least * 0.999 for before, after in pairwise(ticks))


def test_answers_are_counted_in_whole_numbers() -> None:
    column = Column(mark="tuned", low=1.1, high=1.2, count=1)
    pictures = (
        draw_histogram([column], "axis", "says", is_logarithmic=True),
        draw_bars({"f32": {"tuned": 1.0}, "bf16": {"tuned": 2.0}}, "answers", "says"),
    )

    counts = re.compile(r"\d\.5|0\.[2468]|1\.[1-9]0|[12]\.0")
    for picture in pictures:
        marks = [text for text in _texts(picture) if counts.fullmatch(text)]
        assert not marks
        assert {"0", "1"} <= set(_texts(picture))


def test_the_only_mark_of_bars_is_named() -> None:
    assert "tie" in _texts(draw_bars({"f32": {"tie": 3.0}}, "answers", "says"))
