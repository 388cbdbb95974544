"""The section of a page that says for which CPUs there are answers, and how old they are."""

from collections.abc import Sequence

from gemm_tuner.cli.reports.page.answers import Answer
from gemm_tuner.cli.reports.page.content import Block, Section, Table
from gemm_tuner.cli.reports.page.summary import mark_of
from gemm_tuner.plots.draw import draw_bars


def coverage_section(answers: Sequence[Answer]) -> Section:
    """Return how many answers each CPU has, of what kind, and when the last was measured."""
    by_cpu: dict[str, list[Answer]] = {}
    for answer in answers:
        by_cpu.setdefault(answer.verdict.cpu_key, []).append(answer)
    by_cpu = dict(sorted(by_cpu.items(), key=lambda item: -len(item[1])))
    bars: dict[str, dict[str, float]] = {}
    for key, of_cpu in by_cpu.items():
        bar = bars.setdefault(key, {})
        for mark in map(mark_of, of_cpu):
            bar[mark] = bar.get(mark, 0) + 1
    return Section(
        title="CPUs",
        blocks=(
            Block(
                words=(
                    "What was measured on one kind of CPU says nothing of the speed on another.",
                    "A key has vendor, family, model, vectors, stepping and caches.",
                ),
                picture=draw_bars(
                    bars, "answers", "Answers of each CPU; the table below has the figures."
                ),
                table=Table(
                    title="Answers of each CPU",
                    columns=(
                        "key",
                        "CPU",
                        ">problems",
                        ">answers",
                        ">tuned",
                        ">tie",
                        ">baseline",
                        ">not believed",
                        "last measured",
                    ),
                    rows=[_cells(key, of_cpu, bars[key]) for key, of_cpu in by_cpu.items()],
                    is_folded=False,
                ),
            ),
        ),
    )


def _cells(key: str, answers: Sequence[Answer], bar: dict[str, float]) -> tuple[str, ...]:
    dates = [answer.verdict.tried_at for answer in answers if answer.verdict.tried_at]
    return (
        key,
        answers[-1].cpu.brand,
        str(len({answer.problem for answer in answers})),
        str(len(answers)),
        *(f"{bar.get(mark, 0):g}" for mark in ("tuned", "tie", "baseline", "not believed")),
        f"{max(dates):%Y-%m-%d}" if dates else "not known",
    )
