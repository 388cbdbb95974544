"""What the pages name is there: links, anchors, commands with their options, decisions."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from gemm_tuner.cli import main

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
_FOLDERS = ("docs", "examples", "deploy", "benchmarks")
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(page for folder in _FOLDERS for page in (ROOT / folder).rglob("*.md")),
]

_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_IN_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_CALL = re.compile(
    r"gemm-tuner ([a-z][a-z-]*)\b(?! \d`)((?:\\\n|[^\n#`|])*)"
)  # not `... verdict 1`
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@cache
def _anchors(page: Path) -> frozenset[str]:
    return frozenset(map(_anchor, _HEADING.findall(_CODE.sub("", page.read_text("utf-8")))))


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"{link}: there is no such heading"


@cache
def _command(name: str) -> Any:  # noqa: ANN401 - typer names no public type for a command
    group: Any = typer.main.get_command(main.app)
    return group.resolve_command(group.context_class(group), [name])[1]


def _options(command: Any) -> set[str]:  # noqa: ANN401 - as above
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def _unknown_options(page: Path) -> Iterator[str]:
    for code in _IN_CODE.findall(page.read_text("utf-8")):
        for name, rest in _CALL.findall(code):
            if name not in main.COMMANDS:
                yield f"gemm-tuner {name}"
                continue
            command, words = _command(name), rest.split()
            if words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words[0]]
            given = _OPTION.findall(rest.partition(" -- ")[0])
            known = _options(command) | {"--help"}
            yield from (f"gemm-tuner {name} {each}" for each in given if each not in known)


def test_every_link_leads_somewhere() -> None:
    broken = {str(page.relative_to(ROOT)): list(_broken_links(page)) for page in PAGES}

    assert {page: found for page, found in broken.items() if found} == {}


def test_every_command_and_option_that_a_page_names_is_there() -> None:
    unknown = {str(page.relative_to(ROOT)): list(_unknown_options(page)) for page in PAGES}

    assert {page: found for page, found in unknown.items() if found} == {}


def test_the_index_names_every_decision_by_its_title() -> None:
    index = (DECISIONS / "README.md").read_text("utf-8")

    for page in DECISIONS.glob("0*.md"):
        title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        assert f"- [{title}]({page.name})" in index, f"docs/decisions/README.md needs {title!r}"
        assert title.startswith(f"{int(page.name[:4])}. "), f"{page.name} has no number"
