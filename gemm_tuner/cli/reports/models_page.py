"""The page of whole models: a table, a plot, and the conditions, written into a page that is there.

What stands between two marks is written anew; the rest of the page is a person's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.bench_models_report import (
    cases_text,
    is_slower,
    mean_text,
    means,
    ordered,
    reasons,
    remarks,
    time_cell,
    why_slower,
)
from gemm_tuner.cli.reports.plotting import check_plots
from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.model_run import ModelRun, WayRun
from gemm_tuner.domain.verdict import BASELINE_BELOW, TUNED_ABOVE
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import read_bounded
from gemm_tuner.models.table import PRECISIONS
from gemm_tuner.user_file import user_file

BEGIN, END = "<!-- bench-models: begin -->", "<!-- bench-models: end -->"
_MOST_BYTES = 1 << 20
_NEW_PAGE = f"# Whole models\n\n{BEGIN}\n{END}\n"
_NAMES = {
    "tuned": "our way is faster",
    "tie": "not decided",
    "baseline": "another way is faster",
    "not believed": "not believed",
}


def check_page(path: Path, *, beside: Path, db: str | None) -> None:
    """Check that a page and its plot can be written, before a long measurement.

    Raises:
        MissingCapability: matplotlib is not installed.
        InvalidSetting: the page is there without the marks, or cannot be read or written, or its
            plot would take the place of it or of the file `beside`, or one of them is a file of
            the database.
    """
    check_plots("whole models")
    plot = _plot(path)
    if plot in (path, beside) or plot.absolute() == beside.absolute():
        raise _cannot(path, f"its plot would take the place of {plot}")
    _parts(path)
    for file in (path, plot):
        check_place(file, databases=[db])


def write_page(path: Path, runs: Sequence[ModelRun]) -> None:
    """Write what was measured into a page, and the plot beside it.

    Raises:
        InvalidSetting: one of the files cannot be written.
    """
    before, after = _parts(path)
    plot = _plot(path)
    shown = [run for run in ordered(runs) if run.ratio is not None]
    text = "\n".join([BEGIN, *_lines(runs, plot.name if shown else None), END])
    contents = {plot: _picture(shown).encode()} if shown else {}
    contents[path] = f"{before}{text}{after}".encode()
    for place, content in contents.items():
        with user_file(place) as file:
            file.write(content)


def _plot(path: Path) -> Path:
    return path.with_suffix(".svg") if path.name else path


def _parts(path: Path) -> tuple[str, str]:
    """Return what stands before and after the marks of a page, of a new one where there is none."""
    try:
        page = read_bounded(path, _MOST_BYTES).decode()
    except FileNotFoundError:
        page = _NEW_PAGE
    except (OSError, UnicodeDecodeError) as error:
        raise _cannot(path, str(error)) from error
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise _cannot(path, f"it is there, and has no lines {BEGIN} and {END}")
    if BEGIN in after or END in after:
        raise _cannot(path, f"it has lines {BEGIN} and {END} more than once")
    return before, after


def _cannot(path: Path, why: str) -> InvalidSetting:
    return InvalidSetting(f"page {path} cannot be written: {why}; give another one by --markdown.")


def _lines(runs: Sequence[ModelRun], plot: str | None) -> Iterator[str]:
    yield ""
    if any(run.case.is_small for run in runs):
        yield "**Small models, to see that ways work: these times mean nothing.**\n"
    yield from _conditions(runs)
    yield ""
    for mean in means(runs):
        yield f"- {mean_text(mean)}"
    yield ""
    if plot is not None:
        yield f"![Speed over the best of the other ways]({plot})\n"
    yield from _table(runs)
    yield from _slower(runs)
    yield from _quantised(runs)
    found = reasons(runs)
    if found:
        yield "\n### Ways that are no result\n"
        for reason, cases in found.items():
            yield f"- {_cell(reason)} ({cases_text(cases, len(runs))})"
    yield ""


def _conditions(runs: Sequence[ModelRun]) -> Iterator[str]:
    conditions = [run.conditions for run in runs]
    packages = dict.fromkeys(
        one.package for run in runs for one in run.ways if one.package and not one.is_ours
    )
    days = sorted(one.measured_at[:10] for one in conditions)
    doubted = [run.case.text for run in runs if run.doubt]
    cases = f"{len(doubted)} of {len(runs)} cases" if doubted else "no case"
    machines = dict.fromkeys(
        f"{one.cpu} (`{one.cpu_key}`), Linux {one.kernel_release}, huge pages {one.huge_pages}"
        for one in conditions
    )
    rounds = sorted({run.rounds for run in runs})
    versions = ", ".join(dict.fromkeys(one.generator for one in conditions))
    built_with = "; ".join(dict.fromkeys(one.built_with for one in conditions if one.built_with))
    until = "" if days[0] == days[-1] else f" to {days[-1]}"
    others, stolen = (
        max(getattr(one, name) for one in conditions) for name in ("others", "stolen")
    )
    yield f"- CPU: {_cell('; '.join(machines))}"
    yield f"- Versions: {_cell(versions)}; {_cell(', '.join(packages))}"
    if built_with:
        yield f"- Models made with: {_cell(built_with)}"
    yield f"- Measured: {days[0]}{until}, rounds: {', '.join(map(str, rounds))}"
    yield (
        f"- Not believed: {cases}; other work kept at most {others:.1f} cores busy, and the "
        f"hypervisor took at most {stolen:.1%} of the time"
    )


def _table(runs: Sequence[ModelRun]) -> Iterator[str]:
    names = list(dict.fromkeys(one.way for run in runs for one in run.ways))
    columns = ("Case", *names, "Our speed over the best of the others", "95 %", "Of the limit", "")
    yield _table_row(*columns)
    yield "|---" * len(columns) + "|"
    for run in ordered(runs):
        by_name = {one.way: one for one in run.ways}
        share, ratio = run.share_of_limit, run.ratio
        best = f"{ratio.median:.3f} ({run.rival.way})" if ratio and run.rival else ""
        yield _table_row(
            run.case.text,
            *(time_cell(by_name[name]) if name in by_name else "" for name in names),
            f"**{best}**" if is_slower(run) else best,
            f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio else "",
            f"{share:.0%}" if share else "",
            remarks(run),
        )


def _slower(runs: Sequence[ModelRun]) -> Iterator[str]:
    slower = [run for run in ordered(runs) if is_slower(run)]
    if not slower:
        return
    yield "\n### Where another way is faster\n"
    for run in slower:
        assert run.ours is not None
        yield f"- {run.case.text}: {run.ours.way}: {why_slower(run)}"
        for why in run.ours.why_left:
            yield f"  - left: {_cell(why)}"


def _quantised(runs: Sequence[ModelRun]) -> Iterator[str]:
    """Say how near the outputs of quantised models are to those in f32."""
    found = [run for run in ordered(runs) if PRECISIONS[run.case.dtype].needs]
    if not found:
        return
    names = list(dict.fromkeys(one.way for run in found for one in run.ways if one.is_result))
    yield "\n### Outputs of quantised models\n"
    yield (
        "The share of rows whose largest element is where it is in f32, and the largest distance "
        "over the largest element.\n"
    )
    yield _table_row("Case", *names)
    yield "|---" * (len(names) + 1) + "|"
    for run in found:
        by_name = {one.way: _outputs_cell(one) for one in run.ways if one.is_result}
        yield _table_row(run.case.text, *(by_name.get(name, "") for name in names))


def _outputs_cell(one: WayRun) -> str:
    if one.agreement is None or one.error is None:
        return ""
    return f"{one.agreement:.1%}, {one.error:.1e}"


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Return text on one line, which ends no cell and is no HTML."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _picture(runs: Sequence[ModelRun]) -> str:
    from gemm_tuner.plots.ratios import RatioRow, draw_ratios  # noqa: PLC0415 - loads matplotlib
    from gemm_tuner.plots.theme import MARKS, in_own_file  # noqa: PLC0415

    rows = []
    for run in runs:
        assert run.ratio is not None
        assert run.rival is not None
        mark = "not believed" if run.doubt else _mark(run.ratio)
        rows.append(RatioRow(name=run.case.text, ratios={mark: (run.ratio, run.rival.way)}))
    marks = {mark: MARKS[mark] for mark in _NAMES}
    return in_own_file(draw_ratios(rows, "Speed over the best of the other ways", marks, _NAMES))


def _mark(ratio: Ratio) -> str:
    if ratio.low > TUNED_ABOVE:
        return "tuned"
    return "baseline" if ratio.high < BASELINE_BELOW else "tie"
