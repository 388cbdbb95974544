"""The parts of rendered kernels: what each defines, what it uses, and what its first line says."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from jinja2 import BaseLoader, Environment, FileSystemLoader

from gemm_tuner.codegen.environment import environment
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.resources import templates_dir
from gemm_tuner.space.catalog import family_named

_BEGIN, _END = "//@begin ", "//@end"
_HEADER = re.compile(r"\{# gives: (?P<gives>.*?) · needs: (?P<needs>.*?) #\}\n")
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|"[^"\n]*"')
_ATTRIBUTE = re.compile(r"\[\[.*?\]\] ?|__attribute__\(\(.*?\)\)\)?|alignas\(.*?\)")
# A type before a name declares it: a parameter or a local variable.
_NO_TYPE = r"\b(?!(?:return|else|typename|const|constexpr|inline|static|typedef)\b)"
_DECLARATION = re.compile(_NO_TYPE + r"(?=[A-Za-z_]\w*(?:<[^<>]*>)? [*&]*(\w+))")
# A definition begins at the margin: a type, a constant, or a function.
_DEFINITIONS = (
    re.compile(r"^typedef [^;{]*?\b(\w+)\s*;", re.MULTILINE),
    re.compile(r"^(?:struct|using) (\w+)", re.MULTILINE),
    re.compile(r"^(?:static )?(?:inline )?constexpr [\w ]*?\b(\w+)(?:\[\w*\])* =", re.MULTILINE),
    re.compile(r"^constexpr (?:Rise) (\w+) =", re.MULTILINE),
    re.compile(
        r"^(?!typedef|using|struct|return|static_assert)[\w][^\n;={(]*?[ *&](\w+)\(", re.MULTILINE
    ),
    re.compile(r"^#define (\w+)\(", re.MULTILINE),
)


@cache
def defined_names(text: str) -> frozenset[str]:
    """Return the names that a piece of a kernel defines at the margin."""
    plain = _ATTRIBUTE.sub("", _COMMENT_OR_TEXT.sub("", text))
    return frozenset(name for pattern in _DEFINITIONS for name in pattern.findall(plain))


def used_names(text: str, known: set[str]) -> frozenset[str]:
    """Return which of the known names a piece of a kernel uses, and does not declare itself."""
    plain = _COMMENT_OR_TEXT.sub("", text)
    return frozenset(_WORD.findall(plain)) & known - frozenset(_DECLARATION.findall(plain))


@cache
def header(name: str) -> tuple[list[str], list[str]]:
    """Return what the first line of a part says that it gives, and that it needs."""
    found = _HEADER.match((templates_dir() / name).read_text())
    assert found, f"{name} does not begin with what it gives and needs"
    gives, needs = (
        [] if text == "nothing" else text.split(", ") for text in (found["gives"], found["needs"])
    )
    return gives, needs


def defined_in_file(name: str) -> frozenset[str]:
    """Return the names that a part may define, whatever it is rendered for."""
    text = (templates_dir() / name).read_text()
    return defined_names(re.sub(r"\{[%#].*?[%#]\}\n?", "", text, flags=re.DOTALL))


def all_parts() -> list[str]:
    """Return the names of the files of all parts."""
    root = templates_dir()
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.cpp.j2")
        if path.parent != root and path.parent.name != "abi"
    )


class _MarkedParts(BaseLoader):
    """Templates between marks, so that a kernel says which part each line is of."""

    def __init__(self, root: Path) -> None:
        self._loader = FileSystemLoader(root)

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        text, path, is_fresh = self._loader.get_source(environment, template)
        if template.endswith(".cpp.j2"):
            text = f"{_BEGIN}{template}\n{text.rstrip()}\n{_END}\n"
        return text, path, is_fresh


_MARKED_PARTS = _MarkedParts(templates_dir())


def render_in_parts(problem: str, candidate: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a kernel, each with its own text, in the order in which they end."""
    jinja = environment()
    before = jinja.loader
    jinja.loader = _MARKED_PARTS
    try:
        chosen = Candidate.parse(candidate)
        family = family_named(chosen.micro_kernel.family)
        text = render(Problem.parse(problem), chosen, family).text
    finally:
        jinja.loader = before
    open_parts: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        mark = line.strip()
        if mark.startswith(_BEGIN):
            open_parts.append((mark.removeprefix(_BEGIN), []))
        elif mark == _END:
            name, lines = open_parts.pop()
            yield name, "\n".join(lines)
        elif open_parts:
            open_parts[-1][1].append(line)
