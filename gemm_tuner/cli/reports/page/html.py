"""From sections to one file of HTML that loads nothing and runs nothing."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gemm_tuner.cli.reports.page.answers import Contents
from gemm_tuner.cli.reports.page.comparison import comparison_sections
from gemm_tuner.cli.reports.page.content import Section
from gemm_tuner.cli.reports.page.coverage import coverage_section
from gemm_tuner.cli.reports.page.curves import curve_section
from gemm_tuner.cli.reports.page.groups import group_sections
from gemm_tuner.cli.reports.page.guide import guide_section
from gemm_tuner.cli.reports.page.searches import time_section
from gemm_tuner.cli.reports.page.summary import summarise
from gemm_tuner.domain.printable import harmless

_FOLDER = Path(__file__).parent
_FIGURES = Markup(' class="f"')


def write_page(
    contents: Contents,
    *,
    at: datetime,
    by: str,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> str:
    """Return the page of a database; `by` is the version that wrote it, `at` that moment.

    `tell` hears how many groups of answers are drawn, of how many.
    """
    answers = contents.answers
    sections = [
        summarise(contents),
        guide_section(of_one_database=True),
        *group_sections(answers, tell),
        curve_section(answers),
        time_section(contents),
        coverage_section(answers),
    ]
    told = [section for section in sections if section is not None]
    return _render(f"Kernels of {contents.name}", told, at, by)


def write_comparison(first: Contents, second: Contents, *, at: datetime, by: str) -> str:
    """Return the page that sets two databases side by side."""
    sections = [
        *comparison_sections(first, second),
        guide_section(of_one_database=False),
        summarise(first),
        summarise(second),
    ]
    return _render(f"Kernels of {first.name} and of {second.name}", sections, at, by)


def _render(title: str, sections: Sequence[Section], at: datetime, by: str) -> str:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        sections=sections,
        at=f"{at:%Y-%m-%d %H:%M} UTC",
        by=by,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - ours
        picture_of=Markup,
        align=_align,
    )


def _align(column: str) -> Markup:
    """Return the attribute of a column's cells: figures stand on the right."""
    return _FIGURES if column.startswith(">") else Markup()


def _harmless(value: object) -> object:
    """Return what stands in the page: text of a database obeys nobody's terminal or reader."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return harmless(str(value)) if is_text else value
