"""The section of a page with the speed over m, of layers that were tuned for several m."""

from collections.abc import Sequence

from gemm_tuner.cli.reports.page.answers import Answer
from gemm_tuner.cli.reports.page.content import Block, Section, Table, evenly
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import context_text, counted, time_text
from gemm_tuner.plots.draw import Line, Panel, draw_panels

LEAST_POINTS = 3
MOST_LAYERS = 12
MOST_POINTS = 40
_EACH_M = (
    "Each m has a kernel of its own, timed beside its baseline; different m were timed at "
    "different times. Baselines may differ from one m to the next: the table names them."
)


def curve_section(answers: Sequence[Answer]) -> Section | None:
    """Return the speed over m of layers tuned for three m or more, None if there are none."""
    layers: dict[tuple[object, ...], list[Answer]] = {}
    for answer in answers:
        if answer.problem.m.exact:
            layers.setdefault(_layer(answer), []).append(answer)
    curves = [
        sorted(of_layer, key=lambda one: one.problem.m.low)
        for of_layer in layers.values()
        if len(of_layer) >= LEAST_POINTS
    ]
    if not curves:
        return None
    curves.sort(key=lambda curve: (-len(curve), curve[0].problem.text))
    drawn = [evenly(curve, MOST_POINTS) for curve in curves[:MOST_LAYERS]]
    more = f" The {MOST_LAYERS} with the most m are drawn." if len(drawn) < len(curves) else ""
    if any(len(curve) > MOST_POINTS for curve in curves):
        more += f" Of a layer, {MOST_POINTS} m are drawn at most, taken evenly."
    return Section(
        title="Speed over m",
        blocks=(
            Block(
                words=(
                    f"{counted(len(curves), 'layer')} tuned for {LEAST_POINTS} or more m.{more}",
                    _EACH_M,
                ),
                picture=draw_panels(
                    [_panel(curve) for curve in drawn],
                    "Speed of kernels and baselines over m; the table below has the figures.",
                ),
                table=Table(
                    title=f"Speed over m of {counted(len(drawn), 'layer')}",
                    columns=(
                        "layer",
                        ">m",
                        ">time of a call",
                        ">GFLOP/s",
                        ">of the baseline",
                        "baseline",
                        ">time in one library for a range",
                    ),
                    rows=[
                        (
                            _title(curve[0]),
                            str(one.problem.m.low),
                            time_text(one.measured.candidate_median_ns),
                            f"{one.gflop_per_s:.4g}",
                            f"{one.baseline_gflop_per_s:.4g}",
                            one.measured.baseline,
                            time_text(one.in_range_ns) if one.in_range_ns else "",
                        )
                        for curve in drawn
                        for one in curve
                    ],
                ),
            ),
        ),
    )


def _layer(answer: Answer) -> tuple[object, ...]:
    problem = answer.problem
    return (answer.verdict.cpu_key, answer.context, *_words(problem))


def _words(problem: Problem) -> tuple[str, ...]:
    """Return the words of a problem without m."""
    return (
        problem.types.text,
        f"{problem.columns.text}x{problem.k}",
        problem.layout_text,
        problem.epilogue.text,
        problem.reduction.value,
        problem.operation.value,
    )


def _title(answer: Answer) -> str:
    types, sizes, layout, epilogue, reduction, _operation = _words(answer.problem)
    shown = [*answer.problem.operation.words, types, sizes, *([layout] if layout != "nk" else [])]
    shown += [epilogue] if answer.problem.epilogue.steps else []
    shown += [reduction] if answer.problem.is_fixed else []
    return f"{' '.join(shown)}, {context_text(answer.context)}"


def _panel(curve: Sequence[Answer]) -> Panel:
    in_range = [
        (one.problem.m.low, one.problem.flop(one.problem.m.low) / one.in_range_ns)
        for one in curve
        if one.in_range_ns
    ]
    names = {one.measured.baseline.partition(" ")[0] for one in curve}
    return Panel(
        title=_title(curve[0]),
        lines=(
            Line(name="kernel", points=[(one.problem.m.low, one.gflop_per_s) for one in curve]),
            Line(
                name=names.pop() if len(names) == 1 else "the baseline of each m",
                points=[(one.problem.m.low, one.baseline_gflop_per_s) for one in curve],
            ),
            *([Line(name="one library for a range", points=in_range)] if in_range else []),
        ),
    )
